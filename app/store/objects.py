"""Stored objects of all kinds in one table, so that bounds, expiry, accounts and lists are the same for all of them.

The functions run in a transaction of `Store.query` or `Store.transact`. Side tables of a kind refer to
`objects (seq)` with ON DELETE CASCADE.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.app.settings import AppSettings
from tessera.app.store.errors import StoreFullError, StoreQuotaError
from tessera.app.store.schema import Schema

# Sizes are counted by triggers. INSERT OR REPLACE would not fire that of the row it replaces: use ON CONFLICT.
OBJECTS = Schema(
    "objects",
    (
        (
            """CREATE TABLE objects (
                seq INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, tenant TEXT NOT NULL, id TEXT NOT NULL,
                label TEXT NOT NULL, created INTEGER NOT NULL, used REAL NOT NULL, expires REAL, size INTEGER NOT NULL,
                has_content INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (kind, tenant, id)
            )""",
            "CREATE TABLE removed_contents (id TEXT PRIMARY KEY)",
            """CREATE TRIGGER remove_content AFTER DELETE ON objects WHEN old.has_content BEGIN
                INSERT OR IGNORE INTO removed_contents VALUES (old.id);
            END""",
            "CREATE INDEX objects_in_order ON objects (kind, tenant, seq)",
            "CREATE INDEX objects_by_use ON objects (kind, tenant, used, size)",
            "CREATE INDEX objects_by_expiry ON objects (expires) WHERE expires IS NOT NULL",
            """CREATE TABLE usage (
                kind TEXT NOT NULL, tenant TEXT NOT NULL, count INTEGER NOT NULL, bytes INTEGER NOT NULL,
                PRIMARY KEY (kind, tenant)
            ) WITHOUT ROWID""",
            """CREATE TRIGGER count_insert AFTER INSERT ON objects BEGIN
                INSERT INTO usage VALUES (new.kind, new.tenant, 1, new.size)
                ON CONFLICT DO UPDATE SET count = count + 1, bytes = bytes + new.size;
            END""",
            """CREATE TRIGGER count_delete AFTER DELETE ON objects BEGIN
                UPDATE usage SET count = count - 1, bytes = bytes - old.size
                WHERE kind = old.kind AND tenant = old.tenant;
                DELETE FROM usage WHERE kind = old.kind AND tenant = old.tenant AND count = 0;
            END""",
            """CREATE TRIGGER count_resize AFTER UPDATE OF size ON objects BEGIN
                UPDATE usage SET bytes = bytes + new.size - old.size WHERE kind = new.kind AND tenant = new.tenant;
            END""",
        ),
    ),
)

COLUMNS = "seq, tenant, id, label, created, expires, size, body"
ONE = "kind = :kind AND tenant = :tenant AND id = :id"
LIVE = "(expires IS NULL OR expires > :now)"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One row.

    Attributes:
        seq: its number among all objects, in the order of creation.
        label: what lists of its kind can be narrowed down to.
        created: Unix time.
        expires: Unix time, or None.
        size: bytes that count towards the bounds.
    """

    seq: int
    tenant: str
    id: str
    label: str
    created: int
    expires: float | None
    size: int
    body: bytes


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of the whole store.

    Attributes:
        max_bytes: of all kinds and tenants together.
        max_age: seconds after which an object expires; None keeps it.
    """

    max_bytes: int
    max_age: float | None

    @classmethod
    def of(cls, settings: AppSettings) -> StoreLimits:
        days = settings.data_days
        return cls(int(settings.data_limit * 2**30), days * 86400.0 if days else None)


@dataclass(frozen=True, slots=True)
class ObjectPage:
    objects: Sequence[StoredObject]
    has_more: bool


class ObjectTable:
    """The objects of one kind, within bounds.

    Args:
        kind: their name, such as "file".
        max_count, max_bytes: most objects and bytes of one tenant.
        evicts: beyond a bound the tenant's least recently used objects of this kind go; otherwise it is an error.
    """

    def __init__(self, kind: str, limits: StoreLimits, *, max_count: int, max_bytes: int, evicts: bool) -> None:
        self.kind = kind
        self._limits = limits
        self._max_count = max_count
        self.max_bytes = max_bytes
        self._evicts = evicts

    def insert(
        self,
        database: sqlite3.Connection,
        tenant: str,
        object_id: str,
        body: bytes,
        *,
        label: str = "",
        extra_bytes: int = 0,
        has_content: bool = False,
        lifetime: float | None = None,
        is_bounded: bool = True,
        is_aging: bool = True,
    ) -> int:
        """Store a new object; -> its `seq`.

        Args:
            extra_bytes: what it takes beside its body, in side tables and as a file.
            has_content: the store's contents have a file of its id, which goes with it.
            lifetime: seconds until it expires, where that is less than the store's `max_age`.
            is_bounded: false stores it whatever the bounds.
            is_aging: false keeps it until `expire` is called.

        Raises:
            StoreFullError: it is beyond a bound, and nothing can be evicted for it.
        """
        size = len(body) + extra_bytes
        if is_bounded:
            self.make_room(database, tenant, size)
        now = time.time()
        cursor = database.execute(
            "INSERT INTO objects (kind, tenant, id, label, created, used, expires, size, has_content,"
            " body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(self.kind, tenant, object_id, label, int(now), now),
                *(self.expiry(int(now), lifetime) if is_aging else None, size, has_content, body),
            ),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def expiry(self, created: float, lifetime: float | None = None) -> float | None:
        """When an object expires, as Unix time; None: never."""
        bounds = [bound for bound in (self._limits.max_age, lifetime) if bound is not None]
        return created + min(bounds) if bounds else None

    def replace_body(
        self, database: sqlite3.Connection, tenant: str, object_id: str, body: bytes, *, extra_bytes: int = 0
    ) -> bool:
        """-> whether the object exists."""
        values = {"kind": self.kind, "tenant": tenant, "id": object_id, "body": body, "size": len(body) + extra_bytes}
        return database.execute(f"UPDATE objects SET body = :body, size = :size WHERE {ONE}", values).rowcount > 0

    def expire(self, database: sqlite3.Connection, tenant: str, object_id: str, expires: float | None) -> None:
        """Let it expire at a Unix time; None keeps it."""
        values = {"kind": self.kind, "tenant": tenant, "id": object_id, "expires": expires}
        database.execute(f"UPDATE objects SET expires = :expires WHERE {ONE}", values)

    def find(self, database: sqlite3.Connection, tenant: str, object_id: str) -> StoredObject | None:
        values = {"kind": self.kind, "tenant": tenant, "id": object_id, "now": time.time()}
        row = database.execute(f"SELECT {COLUMNS} FROM objects WHERE {ONE} AND {LIVE}", values).fetchone()
        return StoredObject(*row) if row is not None else None

    def mark_used(self, database: sqlite3.Connection, tenant: str, object_id: str) -> None:
        """Let it be evicted after those that were used before."""
        values = {"kind": self.kind, "tenant": tenant, "id": object_id, "now": time.time()}
        database.execute(f"UPDATE objects SET used = :now WHERE {ONE}", values)

    def delete(self, database: sqlite3.Connection, tenant: str, object_id: str) -> bool:
        """-> whether there was one."""
        values = {"kind": self.kind, "tenant": tenant, "id": object_id, "now": time.time()}
        return database.execute(f"DELETE FROM objects WHERE {ONE} AND {LIVE}", values).rowcount > 0

    def page(
        self,
        database: sqlite3.Connection,
        tenant: str,
        *,
        limit: int,
        ascending: bool,
        after: str | None = None,
        label: str | None = None,
        accepts: Callable[[StoredObject], bool] | None = None,
    ) -> ObjectPage | None:
        """Objects in the order of their creation; None where there is no object `after`.

        Args:
            label: only objects with this label.
            accepts: only objects for which it returns true.
        """
        values: dict[str, Any] = {"kind": self.kind, "tenant": tenant, "now": time.time(), "label": label}
        conditions = ["kind = :kind", "tenant = :tenant", LIVE]
        if label is not None:
            conditions.append("label = :label")
        if after is not None:
            first = self.find(database, tenant, after)
            if first is None:
                return None
            values["after"] = first.seq
            conditions.append("seq > :after" if ascending else "seq < :after")
        rows = database.execute(
            f"SELECT {COLUMNS} FROM objects WHERE {' AND '.join(conditions)} ORDER BY seq"
            f" {'ASC' if ascending else 'DESC'}",
            values,
        )
        found: list[StoredObject] = []
        for row in rows:
            stored = StoredObject(*row)
            if accepts is None or accepts(stored):
                if len(found) == limit:
                    return ObjectPage(found, has_more=True)
                found.append(stored)
        return ObjectPage(found, has_more=False)

    def make_room(self, database: sqlite3.Connection, tenant: str, size: int) -> None:
        """Evict what must go for one more object of `size` bytes. Raises StoreFullError."""
        delete_expired(database)
        count, num_bytes = self.usage(database, tenant)
        num_excess = count + 1 - self._max_count
        excess = max(num_bytes + size - self.max_bytes, _total(database) + size - self._limits.max_bytes)
        if num_excess <= 0 and excess <= 0:
            return
        if not self._evicts:
            bound = f"{self._max_count} {self.kind}s" if num_excess > 0 else f"{self.max_bytes} bytes of {self.kind}s"
            if num_excess <= 0 and num_bytes + size <= self.max_bytes:
                raise StoreFullError()
            raise StoreQuotaError(f"At most {bound} are stored for each API key; delete some first.")
        if excess > num_bytes or self._max_count < 1:
            raise StoreFullError()
        last = 0.0
        for used, freed in database.execute(
            "SELECT used, size FROM objects WHERE kind = ? AND tenant = ? ORDER BY used", (self.kind, tenant)
        ):
            if num_excess <= 0 and excess <= 0:
                break
            last, num_excess, excess = used, num_excess - 1, excess - freed
        database.execute("DELETE FROM objects WHERE kind = ? AND tenant = ? AND used <= ?", (self.kind, tenant, last))

    def check_store(self, database: sqlite3.Connection) -> None:
        """Raise StoreFullError where all kinds and tenants together have more than the store may."""
        if _total(database) > self._limits.max_bytes:
            raise StoreFullError

    def usage(self, database: sqlite3.Connection, tenant: str) -> tuple[int, int]:
        """Number and bytes of a tenant's objects."""
        row = database.execute("SELECT count, bytes FROM usage WHERE kind = ? AND tenant = ?", (self.kind, tenant))
        count, num_bytes = row.fetchone() or (0, 0)
        return count, num_bytes


def _total(database: sqlite3.Connection) -> int:
    """Bytes of all kinds and tenants."""
    (num_bytes,) = database.execute("SELECT COALESCE(SUM(bytes), 0) FROM usage").fetchone()
    return int(num_bytes)


def drop_content(database: sqlite3.Connection, seq: int) -> None:
    """Let the content of an object go, which the next cleaning removes; the object stays."""
    database.execute("INSERT OR IGNORE INTO removed_contents SELECT id FROM objects WHERE seq = ?", (seq,))
    database.execute("UPDATE objects SET has_content = 0 WHERE seq = ?", (seq,))


def delete_expired(database: sqlite3.Connection, limit: int = 1000) -> int:
    """Delete at most `limit` objects whose time is over; -> how many."""
    return database.execute(
        "DELETE FROM objects WHERE seq IN (SELECT seq FROM objects WHERE expires <= ? LIMIT ?)", (time.time(), limit)
    ).rowcount
