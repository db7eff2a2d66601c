"""Tables and their versions: each room declares its own, and a database of an older version is brought up to date."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from tessera.app.store.errors import StoreUnavailableError

VERSIONS = "CREATE TABLE IF NOT EXISTS schemas (name TEXT PRIMARY KEY, version INTEGER NOT NULL)"
RECORD = "INSERT INTO schemas VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET version = excluded.version"


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one room.

    Attributes:
        name: never changes.
        migrations: the statements of each version. A new version is a new entry at the end; those before it stay as
            they are, as databases exist that were made by them.
    """

    name: str
    migrations: tuple[tuple[str, ...], ...]


def migrate(database: sqlite3.Connection, schemas: Iterable[Schema]) -> None:
    """Create or update the tables, in one transaction.

    Raises:
        StoreUnavailableError: the database is of a newer version.
    """
    database.execute("BEGIN IMMEDIATE")
    try:
        database.execute(VERSIONS)
        versions = dict(database.execute("SELECT name, version FROM schemas"))
        for schema in schemas:
            version = versions.get(schema.name, 0)
            if version > len(schema.migrations):
                raise StoreUnavailableError(
                    f"The data folder was written by a newer version of the server ({schema.name} {version});"
                    " use that version, or another --data-dir."
                )
            for statements in schema.migrations[version:]:
                for statement in statements:
                    database.execute(statement)
            if version < len(schema.migrations):
                database.execute(RECORD, (schema.name, len(schema.migrations)))
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
