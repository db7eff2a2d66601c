"""Bounds of a stored kind at their edges, and the store's own life: opening, cleaning, closing."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tessera.app.store import store as store_module
from tessera.app.store.database import Database
from tessera.app.store.errors import StoreFullError, StoreQuotaError, StoreUnavailableError
from tessera.app.store.locks import ProcessLocks
from tessera.app.store.objects import OBJECTS, ObjectTable, StoredObject, StoreLimits, delete_expired, drop_content
from tessera.app.store.store import Store, store_of
from tests.support.processes.descriptors import num_open
from tests.support.servers.http_fixtures import settings_for, write_model_folder

NO_LIMITS = StoreLimits(10**9, None)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "store.sqlite", [OBJECTS])
    yield opened
    opened.close()


# ---- objects ------------------------------------------------------------------------------------


def names(database: Database, table: ObjectTable) -> list[str]:
    page = database.query(lambda db: table.page(db, "t", limit=99, ascending=True))
    assert page is not None
    return [one.id for one in page.objects]


def stored(database: Database, table: ObjectTable, name: str) -> StoredObject | None:
    return database.query(lambda db: table.find(db, "t", name))


def test_bounds_of_a_table_are_met_exactly(database: Database) -> None:
    table = ObjectTable("paper", StoreLimits(100, None), max_count=3, max_bytes=60, evicts=False)

    def insert(name: str, size: int, tenant: str = "t", **options: Any) -> None:
        database.transact(lambda db: table.insert(db, tenant, name, bytes(size), **options))

    insert("a", 50)
    insert("b", 6, extra_bytes=4)
    with pytest.raises(StoreQuotaError, match="At most 60 bytes of papers"):
        insert("c", 1)
    insert("c", 0)
    with pytest.raises(StoreQuotaError, match="At most 3 papers"):
        insert("d", 0)
    insert("a", 40, "u")
    with pytest.raises(StoreFullError) as raised:
        insert("b", 1, "u")
    assert not isinstance(raised.value, StoreQuotaError), "the store's bound, not the tenant's"
    insert("b", 5, "u", is_bounded=False)
    assert database.query(lambda db: table.usage(db, "u")) == (2, 45)
    assert not database.transact(lambda db: table.replace_body(db, "t", "none", b""))
    assert database.transact(lambda db: table.replace_body(db, "t", "a", b"xx", extra_bytes=3))
    assert database.query(lambda db: table.usage(db, "t")) == (3, 15)


def test_a_store_with_more_than_it_may_have_is_full(database: Database) -> None:
    table = ObjectTable("paper", StoreLimits(100, None), max_count=3, max_bytes=60, evicts=False)
    for tenant, size in (("t", 60), ("u", 40)):
        database.transact(lambda db, tenant=tenant, size=size: table.insert(db, tenant, "a", bytes(size)))  # type: ignore[misc]
    database.query(table.check_store)
    database.transact(lambda db: table.replace_body(db, "u", "a", bytes(41)))
    with pytest.raises(StoreFullError):
        database.query(table.check_store)


def test_no_more_is_evicted_than_must_go(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("tessera.app.store.objects.time", SimpleNamespace(time=lambda: clock[0]))
    table = ObjectTable("note", StoreLimits(100, None), max_count=4, max_bytes=60, evicts=True)

    def insert(name: str, size: int, tenant: str = "t") -> None:
        clock[0] += 1
        database.transact(lambda db: table.insert(db, tenant, name, bytes(size)))

    for name in "abcd":
        insert(name, 10)
    clock[0] += 1
    database.transact(lambda db: table.mark_used(db, "t", "a"))
    insert("e", 10)
    assert names(database, table) == ["a", "c", "d", "e"], "by count, the least recently used"
    insert("f", 30)
    assert names(database, table) == ["a", "d", "e", "f"], "by count and bytes at once"
    insert("g", 1)
    assert names(database, table) == ["a", "e", "f", "g"]
    insert("h", 40, "u")
    insert("i", 19)
    assert names(database, table) == ["e", "f", "g", "i"], "ten bytes make room, in the store and in the tenant's share"
    with pytest.raises(StoreFullError):
        insert("j", 61)
    assert names(database, table) == ["e", "f", "g", "i"], "nothing goes for what cannot be stored"
    insert("j", 60)
    assert names(database, table) == ["j"]
    nothing = ObjectTable("note", NO_LIMITS, max_count=0, max_bytes=60, evicts=True)
    with pytest.raises(StoreFullError):
        database.transact(lambda db: nothing.insert(db, "t", "k", b""))


def test_the_last_byte_and_the_last_place_count(database: Database) -> None:
    def insert(table: ObjectTable, name: str, size: int, tenant: str = "t", **options: Any) -> None:
        database.transact(lambda db: table.insert(db, tenant, name, bytes(size), **options))

    full = ObjectTable("full", StoreLimits(100, None), max_count=3, max_bytes=60, evicts=False)
    for name, size, tenant in (("a", 50, "other"), ("a", 20, "t"), ("b", 20, "t")):
        insert(full, name, size, tenant)
    with pytest.raises(StoreFullError) as raised:
        insert(full, "c", 20)
    assert not isinstance(raised.value, StoreQuotaError), "three objects of sixty bytes are the tenant's right"
    database.transact(lambda db: full.expire(db, "t", "a", 1.0))
    insert(full, "c", 20)
    assert names(database, full) == ["b", "c"], "what is expired makes room"
    one = ObjectTable("one", NO_LIMITS, max_count=1, max_bytes=60, evicts=True)
    insert(one, "a", 1)
    insert(one, "b", 60)
    assert names(database, one) == ["b"]
    two = ObjectTable("two", NO_LIMITS, max_count=2, max_bytes=60, evicts=True)
    for name in "abc":
        insert(two, name, 20, is_bounded=False)
    insert(two, "d", 1)
    assert names(database, two) == ["c", "d"], "as many go as are too many"
    insert(two, "c2", 60, is_bounded=False)
    insert(two, "e", 0)
    assert names(database, two) == ["c2", "e"]
    for name in "fg":
        insert(one, name, 30, "u")
    assert database.query(lambda db: one.usage(db, "u")) == (1, 30)
    byte = ObjectTable("byte", NO_LIMITS, max_count=9, max_bytes=60, evicts=True)
    for name, size in (("a", 30), ("b", 30), ("c", 1)):
        insert(byte, name, size)
    assert names(database, byte) == ["b", "c"], "one byte too many is too many"
    assert database.transact(lambda db: byte.replace_body(db, "t", "c", b"xyz"))
    assert database.query(lambda db: byte.usage(db, "t")) == (2, 33)
    assert database.transact(lambda db: byte.delete(db, "t", "c"))
    assert database.query(lambda db: db.execute("SELECT * FROM removed_contents").fetchall()) == []


def test_bounds_of_the_store_are_gibibytes_and_days(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), data_limit=1.5, data_days=2.0)
    assert StoreLimits.of(settings) == StoreLimits(3 * 2**29, 172_800.0)
    assert StoreLimits.of(msgspec.structs.replace(settings, data_days=0.0)).max_age is None


def test_objects_end_with_the_second_they_expire_in(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.75]
    monkeypatch.setattr("tessera.app.store.objects.time", SimpleNamespace(time=lambda: clock[0]))
    table = ObjectTable("note", StoreLimits(10**9, 50.0), max_count=99, max_bytes=999, evicts=False)

    def change(work: Any) -> Any:
        return database.transact(work)

    first = change(lambda db: table.insert(db, "t", "a", b"x", label="l", lifetime=20.0))
    assert change(lambda db: table.insert(db, "t", "b", b"")) == first + 1
    change(lambda db: table.insert(db, "t", "c", b"", is_aging=False))
    kept = [one for name in "abc" if (one := stored(database, table, name)) is not None]
    assert [(one.created, one.expires) for one in kept] == [(1000, 1020.0), (1000, 1050.0), (1000, None)]
    assert (kept[0].seq, kept[0].label, kept[0].size, kept[0].body) == (first, "l", 1, b"x")
    clock[0] = 1020.0
    assert names(database, table) == ["b", "c"]
    assert not change(lambda db: table.delete(db, "t", "a")), "it is gone already"
    assert change(delete_expired) == 1
    change(lambda db: table.expire(db, "t", "b", None))
    change(lambda db: table.expire(db, "t", "c", 1020.5))
    clock[0] = 1100.0
    assert names(database, table) == ["b"]
    for number in range(1001):
        change(lambda db, number=number: table.insert(db, "t", f"n{number}", b"", lifetime=-1, is_bounded=False))
    assert [change(delete_expired) for _ in range(3)] == [1000, 2, 0], "so many at a time"
    never = ObjectTable("note", NO_LIMITS, max_count=1, max_bytes=1, evicts=False)
    assert (never.expiry(5.0), never.expiry(5.0, 2.0), table.expiry(5.0, 99.0)) == (None, 7.0, 55.0)


def test_a_page_says_whether_more_follow(database: Database) -> None:
    table = ObjectTable("note", NO_LIMITS, max_count=99, max_bytes=999, evicts=False)
    for name in "abc":
        database.transact(lambda db, name=name: table.insert(db, "t", name, b""))  # type: ignore[misc]

    def page(limit: int, **options: Any) -> tuple[list[str], bool]:
        found = database.query(lambda db: table.page(db, "t", limit=limit, ascending=True, **options))
        assert found is not None
        return [one.id for one in found.objects], found.has_more

    assert [page(limit) for limit in (2, 3)] == [(["a", "b"], True), (["a", "b", "c"], False)]
    assert page(1, after="b") == (["c"], False)
    assert page(1, accepts=lambda one: one.id != "c", after="a") == (["b"], False)


def test_a_content_that_was_dropped_is_removed_once(database: Database) -> None:
    table = ObjectTable("note", NO_LIMITS, max_count=9, max_bytes=99, evicts=False)
    seq = database.transact(lambda db: table.insert(db, "t", "a", b"", has_content=True))
    for _ in range(2):
        database.transact(lambda db: drop_content(db, seq))
    removed = "SELECT id FROM removed_contents"
    assert database.query(lambda db: db.execute(removed).fetchall()) == [("a",)]
    database.transact(lambda db: db.execute("DELETE FROM removed_contents"))
    database.transact(lambda db: table.delete(db, "t", "a"))
    assert database.query(lambda db: db.execute(removed).fetchall()) == []


# ---- the store ----------------------------------------------------------------------------------


def test_a_temporary_store_goes_with_its_end() -> None:
    async def use() -> Path:
        store = Store(None)
        assert store.is_temporary
        assert store_of(SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(store=store)))) is store  # type: ignore[arg-type]
        for _ in range(2):  # the folder is made, and found
            folder = await store.with_folder("jobs", lambda folder: folder)
        assert folder.name == "jobs"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert await store.with_locks(lambda locks: locks.try_lock(3)) is True
        assert num_open(folder.parent) >= 2
        await store.close()
        assert num_open(folder.parent) == 0, "the database and the locks are closed"
        with pytest.raises(StoreUnavailableError, match="shutting down"):
            await store.query(lambda db: None)
        return folder.parent

    assert not asyncio.run(use()).exists()


def test_a_store_that_stays_keeps_its_folder(tmp_path: Path) -> None:
    async def use() -> None:
        store = Store(tmp_path / "deep" / "data")
        assert not store.is_temporary
        writers = await asyncio.gather(*(store.transact(lambda db: threading.get_ident()) for _ in range(5)))
        assert len(set(writers)) == 1, "changes are made one after the other"
        assert (tmp_path / "deep" / "data").stat().st_mode & 0o777 == 0o700
        assert await store.with_folder("jobs", lambda folder: folder.name) == "jobs"
        await store.close()

    asyncio.run(use())
    assert {path.name for path in (tmp_path / "deep" / "data").iterdir()} == {"store.sqlite", "locks", "files", "jobs"}


def test_the_end_waits_for_what_has_begun_and_not_for_what_waits(tmp_path: Path) -> None:
    begun, may_end = threading.Event(), threading.Event()
    done: list[str] = []

    def hold(database: object) -> bool:
        begun.set()
        return may_end.wait(10)

    async def use() -> tuple[object, object]:
        store = Store(tmp_path)
        first = asyncio.ensure_future(store.transact(hold))
        await asyncio.to_thread(begun.wait, 10)
        second = asyncio.ensure_future(store.transact(lambda db: done.append("second")))
        second.add_done_callback(lambda _: may_end.set())
        asyncio.get_running_loop().call_later(5, may_end.set)
        await asyncio.sleep(0)
        await store.close()
        return await asyncio.gather(first, second, return_exceptions=True)

    first, second = asyncio.run(use())
    assert (first, done) == (True, [])
    assert isinstance(second, asyncio.CancelledError)


def test_a_temporary_store_may_have_gone_before_its_end() -> None:
    async def use() -> None:
        store = Store(None)
        shutil.rmtree(await store.with_folder("jobs", lambda folder: folder.parent))
        await store.close()

    asyncio.run(use())


def test_tables_are_made_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Locks(ProcessLocks):
        def wait_for(self, number: int) -> None:
            done.append(f"lock {number}")
            super().wait_for(number)

        def unlock(self, number: int) -> None:
            done.append(f"unlock {number}")
            super().unlock(number)

    def open_database(path: Path, schemas: Any) -> Database:
        done.append("database")
        return Database(path, schemas)

    monkeypatch.setattr(store_module, "ProcessLocks", Locks)
    monkeypatch.setattr(store_module, "Database", open_database)

    async def use() -> None:
        store = Store(tmp_path)
        for _ in range(2):
            await store.query(lambda db: None)
        await store.close()

    asyncio.run(use())
    assert done == ["lock 0", "database", "unlock 0"]


def test_cleaning_removes_rows_and_contents_and_sweeps_only_when_told(tmp_path: Path) -> None:
    table = ObjectTable("note", NO_LIMITS, max_count=9, max_bytes=99, evicts=False)

    async def use() -> None:
        store = Store(tmp_path)
        await store.transact(lambda db: table.insert(db, "t", "a", b"", has_content=True, lifetime=-1))
        for name in ("a", "lost"):
            (tmp_path / "files" / name).touch()
            os.utime(tmp_path / "files" / name, (0, 0))
        await store.clean()
        left = await store.query(lambda db: db.execute("SELECT COUNT(*) FROM objects").fetchone())
        noted = await store.query(lambda db: db.execute("SELECT COUNT(*) FROM removed_contents").fetchone())
        assert (left, noted) == ((0,), (0,))
        assert os.listdir(tmp_path / "files") == ["lost"]
        await store.clean(sweep=True)
        assert os.listdir(tmp_path / "files") == []
        await store.close()

    asyncio.run(use())


@pytest.mark.parametrize("is_temporary", [False, True])
def test_cleaning_goes_on_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_temporary: bool
) -> None:
    """A sweep at the start and each hour; what cannot be cleaned now is tried again."""
    clock, slept, swept = [0.0], [], []
    faults: list[Exception | None] = [StoreFullError(), ZeroDivisionError(), None, None, None, None]
    lengths = iter([60.0, 60.0, 60.0, 3540.0, 1.0])
    is_over = asyncio.Event()

    class Watched(Store):
        async def clean(self, *, sweep: bool = False) -> None:
            swept.append(sweep)
            if (fault := faults[len(swept) - 1]) is not None:
                raise fault

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if is_temporary and len(slept) == 1:
            return
        length = next(lengths, None)
        if length is None:
            is_over.set()
            await asyncio.Event().wait()
        clock[0] += length or 0.0

    async def use() -> None:
        store = Watched(None if is_temporary else tmp_path)
        store.start()
        await asyncio.wait_for(is_over.wait(), 10)
        await store.close()
        assert len(asyncio.all_tasks()) == 1, "the cleaning has ended"

    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(store_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    asyncio.run(use())
    assert swept == [True, True, True, False, False, True]
    assert slept == [60.0] * (7 if is_temporary else 6)
    messages = [record.message for record in caplog.records if record.name == "tessera.app"]
    assert messages == [
        "what is expired in the data folder cannot be removed just now",
        "what is expired in the data folder could not be removed",
    ]
