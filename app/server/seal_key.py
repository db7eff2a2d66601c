"""The key that seals reasoning, kept in the data folder: all app processes share it, and restarts keep it."""

from __future__ import annotations

import logging
import secrets
import sqlite3

from tessera.app.store.errors import StoreFullError, StoreUnavailableError
from tessera.app.store.schema import Schema
from tessera.app.store.store import Store

logger = logging.getLogger("tessera.app")

KEY_BYTES = 32
NAME = "seal"
SERVER_KEYS = Schema("server_keys", (("CREATE TABLE server_keys (name TEXT PRIMARY KEY, value BLOB NOT NULL)",),))


def new_seal_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


async def stored_seal_key(store: Store) -> bytes:
    """The store's key, which the first process makes; one for this process alone where the store cannot be used."""

    def change(database: sqlite3.Connection) -> bytes:
        database.execute("INSERT OR IGNORE INTO server_keys VALUES (?, ?)", (NAME, new_seal_key()))
        key: bytes = database.execute("SELECT value FROM server_keys WHERE name = ?", (NAME,)).fetchone()[0]
        return key

    try:
        return await store.transact(change)
    except (StoreUnavailableError, StoreFullError):
        logger.warning("reasoning is sealed with a key of this process, and cannot be read after a restart")
        return new_seal_key()
