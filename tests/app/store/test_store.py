"""The store: bounds, expiry, restarts, several processes, kill -9 and full disks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tessera.app.store import database
from tessera.app.store.contents import ABANDONED_AFTER, Contents
from tessera.app.store.errors import StoreFullError, StoreUnavailableError
from tessera.app.store.folder import data_folder
from tessera.app.store.locks import ProcessLocks
from tessera.app.store.objects import ObjectTable, StoreLimits
from tessera.app.store.schema import Schema
from tessera.app.store.store import Store
from tessera.engine.contract.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.processes.descriptors import num_open
from tests.support.processes.disks import small_disk

LIMITS = StoreLimits(max_bytes=10_000, max_age=3600.0)
NOTES = ObjectTable("note", LIMITS, max_count=3, max_bytes=5_000, evicts=True)
PAPERS = ObjectTable("paper", LIMITS, max_count=3, max_bytes=5_000, evicts=False)
T = TypeVar("T")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "data")
    yield store
    asyncio.run(store.close())


def transact(store: Store, change: Callable[[sqlite3.Connection], T]) -> T:
    return asyncio.run(store.transact(change))


def insert(store: Store, table: ObjectTable, object_id: str, size: int = 1, tenant: str = "t", **options: Any) -> int:
    return transact(store, lambda db: table.insert(db, tenant, object_id, b"x" * size, **options))


def ids(store: Store, table: ObjectTable, tenant: str = "t") -> list[str]:
    page = asyncio.run(store.query(lambda db: table.page(db, tenant, limit=100, ascending=True)))
    assert page is not None
    return [stored.id for stored in page.objects]


def test_objects_outlive_a_restart(store: Store, tmp_path: Path) -> None:
    insert(store, NOTES, "a", 10, label="first")
    asyncio.run(store.close())
    again = Store(tmp_path / "data")
    found = asyncio.run(again.query(lambda db: NOTES.find(db, "t", "a")))
    assert found is not None
    assert (found.body, found.label, found.size) == (b"x" * 10, "first", 10)
    asyncio.run(again.close())
    assert (tmp_path / "data" / "store.sqlite").stat().st_mode & 0o077 == 0
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0


def test_tenants_do_not_see_each_other(store: Store) -> None:
    insert(store, NOTES, "a")
    assert ids(store, NOTES, "other") == []
    assert asyncio.run(store.query(lambda db: NOTES.find(db, "other", "a"))) is None
    assert not transact(store, lambda db: NOTES.delete(db, "other", "a"))
    assert transact(store, lambda db: NOTES.delete(db, "t", "a"))


def test_the_least_recently_used_make_room(store: Store) -> None:
    for name in "abc":
        insert(store, NOTES, name)
    transact(store, lambda db: NOTES.mark_used(db, "t", "a"))
    insert(store, NOTES, "d", tenant="other")
    insert(store, NOTES, "e")
    assert ids(store, NOTES) == ["a", "c", "e"]
    insert(store, NOTES, "f", 4_999)
    assert ids(store, NOTES) == ["e", "f"]
    with pytest.raises(StoreFullError):
        insert(store, NOTES, "g", 5_001)
    assert (ids(store, NOTES), ids(store, NOTES, "other")) == (["e", "f"], ["d"])


def test_beyond_its_bounds_a_kind_that_is_not_evicted_is_refused(store: Store) -> None:
    insert(store, PAPERS, "a", 4_000)
    with pytest.raises(StoreFullError, match="At most 5000 bytes of papers"):
        insert(store, PAPERS, "b", 1_001)
    insert(store, PAPERS, "b")
    insert(store, PAPERS, "c")
    with pytest.raises(StoreFullError, match="At most 3 papers are stored for each API key"):
        insert(store, PAPERS, "d")
    insert(store, PAPERS, "a", 4_000, tenant="other")
    with pytest.raises(StoreFullError, match="no space left"):  # of all tenants together
        insert(store, PAPERS, "a", 3_000, tenant="third")
    transact(store, lambda db: PAPERS.delete(db, "other", "a"))
    insert(store, PAPERS, "a", 3_000, tenant="third")


def test_sizes_are_accounted_for_through_all_changes(store: Store) -> None:
    insert(store, NOTES, "a", 100, extra_bytes=50)
    insert(store, NOTES, "b", 10)
    transact(store, lambda db: NOTES.replace_body(db, "t", "a", b"x" * 20, extra_bytes=5))
    assert asyncio.run(store.query(lambda db: NOTES.usage(db, "t"))) == (2, 35)
    transact(store, lambda db: NOTES.delete(db, "t", "a"))
    assert asyncio.run(store.query(lambda db: NOTES.usage(db, "t"))) == (1, 10)


def test_what_is_expired_is_gone_at_once_and_cleaned_with_its_content(store: Store, tmp_path: Path) -> None:
    incoming = asyncio.run(store.with_contents(Contents.begin))
    incoming.write(b"text")
    incoming.publish("a")
    insert(store, NOTES, "a", lifetime=-1, has_content=True)
    insert(store, NOTES, "b", lifetime=10**6)
    assert ids(store, NOTES) == ["b"]
    content = tmp_path / "data" / "files" / "a"
    assert content.exists()
    asyncio.run(store.clean())
    assert not content.exists()
    found = asyncio.run(store.query(lambda db: NOTES.find(db, "t", "b")))
    assert found is not None
    assert found.expires == pytest.approx(time.time() + 3600, abs=60), "no object outlives max_age"


def test_the_file_shrinks_when_much_was_deleted(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SPARE_PAGES", 0)
    wide = ObjectTable("wide", StoreLimits(10**8, None), max_count=100, max_bytes=10**8, evicts=False)
    insert(store, wide, "w", 2**22)
    transact(store, lambda db: wide.delete(db, "t", "w"))
    asyncio.run(store.clean())
    asyncio.run(store.close())
    assert (tmp_path / "data" / "store.sqlite").stat().st_size < 2**20


def test_pages(store: Store) -> None:
    wide = ObjectTable("wide", LIMITS, max_count=100, max_bytes=5_000, evicts=False)
    for number in range(5):
        insert(store, wide, f"w{number}", label="even" if number % 2 == 0 else "odd")

    def page(**options: Any) -> Any:
        found = asyncio.run(store.query(lambda db: wide.page(db, "t", **options)))
        return found and ([stored.id for stored in found.objects], found.has_more)

    assert page(limit=2, ascending=False) == (["w4", "w3"], True)
    assert page(limit=2, ascending=False, after="w1") == (["w0"], False)
    assert page(limit=3, ascending=True, label="even") == (["w0", "w2", "w4"], False)
    assert page(limit=3, ascending=True, accepts=lambda stored: stored.id > "w2") == (["w3", "w4"], False)
    assert page(limit=3, ascending=True, after="nothing") is None


def test_older_tables_are_brought_up_to_date_and_newer_ones_refused(tmp_path: Path) -> None:
    first = ("CREATE TABLE pets (name TEXT)", "INSERT INTO pets VALUES ('cat')")
    second = ("ALTER TABLE pets ADD COLUMN age INTEGER DEFAULT 3",)
    for migrations, expected in (((first,), ("cat",)), ((first, second), ("cat", 3)), ((first, second), ("cat", 3))):
        store = Store(tmp_path / "data", [Schema("pets", migrations)])
        assert asyncio.run(store.query(lambda db: db.execute("SELECT * FROM pets").fetchall())) == [expected]
        asyncio.run(store.close())
    store = Store(tmp_path / "data", [Schema("pets", (first,))])
    with pytest.raises(StoreUnavailableError, match="newer version"):
        asyncio.run(store.query(lambda db: None))
    asyncio.run(store.close())


def test_a_change_that_fails_leaves_nothing(store: Store) -> None:
    def change(connection: sqlite3.Connection) -> None:
        NOTES.insert(connection, "t", "a", b"x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        transact(store, change)
    assert ids(store, NOTES) == []


WRITER = """
import asyncio, sys
from pathlib import Path
from tessera.app.store.objects import ObjectTable, StoreLimits
from tessera.app.store.store import Store
table = ObjectTable("note", StoreLimits(10**9, None), max_count=10**6, max_bytes=10**9, evicts=False)
async def main():
    store = Store(Path(sys.argv[1]))
    for number in range(int(sys.argv[3])):
        def change(database):
            for half in ("left", "right"):
                table.insert(database, sys.argv[2], f"{half}-{number}", b"x" * 3000)
        await store.transact(change)
        print(number, flush=True)
asyncio.run(main())
"""


def writer(folder: Path, tenant: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), tenant, str(count)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_fault_kill_9_while_two_processes_write_loses_nothing_that_was_confirmed(store: Store, tmp_path: Path) -> None:
    other = writer(tmp_path / "data", "other", 40)
    process = writer(tmp_path / "data", "t", 10**6)
    assert process.stdout is not None
    for _ in range(40):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    confirmed = 40 + len(process.stdout.readlines())
    process.wait()
    process.stdout.close()
    other.communicate()
    asyncio.run(store.clean(sweep=True))
    count, num_bytes = asyncio.run(store.query(lambda db: NOTES.usage(db, "t")))
    assert count in (2 * confirmed, 2 * confirmed + 2), "both halves of a change or none"
    assert num_bytes == 3000 * count
    assert asyncio.run(store.query(lambda db: NOTES.usage(db, "other"))) == (80, 240_000)
    check = asyncio.run(store.query(lambda db: db.execute("PRAGMA integrity_check").fetchone()))
    assert check == ("ok",)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = "import sys, pathlib; from tessera.app.store.locks import ProcessLocks"
    script += "; print(ProcessLocks(pathlib.Path(sys.argv[1])).try_lock(7), flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "locks")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"True\n"
    locks = ProcessLocks(tmp_path / "locks")
    assert not locks.try_lock(7)
    assert locks.try_lock(8)
    process.kill()
    process.communicate()
    assert locks.try_lock(7)
    locks.close()


def test_fault_full_disk_the_store_refuses_and_goes_on_when_there_is_space() -> None:
    with small_disk() as disk:
        store = Store(disk / "data")
        insert(store, NOTES, "a")
        filling = disk / "filling"
        with filling.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        with pytest.raises(StoreFullError):  # the log of changes has some room left
            transact(store, lambda db: [NOTES.insert(db, "t", f"b{number}", b"x" * 4000) for number in range(100)])
        with pytest.raises(StoreFullError):
            asyncio.run(store.with_contents(lambda contents: _write(contents, 10**6)))
        assert ids(store, NOTES), "what is there can still be read"
        filling.unlink()
        insert(store, NOTES, "c")
        assert "c" in ids(store, NOTES)
        asyncio.run(store.close())


def _write(contents: Contents, size: int) -> None:
    incoming = contents.begin()
    try:
        incoming.write(b"x" * size)
        incoming.publish("big")
    finally:
        incoming.discard()


def test_a_damaged_database_is_unavailable_and_leaves_no_descriptors(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "store.sqlite").write_bytes(b"not a database" * 100)
    store = Store(tmp_path / "data")
    with pytest.raises(StoreUnavailableError):
        ids(store, NOTES)
    before = num_open(tmp_path)
    for _ in range(10):
        with pytest.raises(StoreUnavailableError):
            ids(store, NOTES)
    assert num_open(tmp_path) <= before
    (tmp_path / "data" / "store.sqlite").unlink()
    insert(store, NOTES, "a")
    assert ids(store, NOTES) == ["a"]
    asyncio.run(store.close())


def test_contents_that_a_crash_left_are_swept_once_they_are_old(store: Store, tmp_path: Path) -> None:
    insert(store, NOTES, "known", has_content=True)
    files = tmp_path / "data" / "files"
    for name in ("known", "orphan", "fresh", "fresh.part", "old.part"):
        (files / name).write_bytes(b"x")
        if not name.startswith("fresh"):
            os.utime(files / name, (0, time.time() - ABANDONED_AFTER - 1))
    asyncio.run(store.clean(sweep=True))
    assert {path.name for path in files.iterdir()} == {"known", "fresh", "fresh.part"}


def test_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert data_folder(None) == tmp_path / "state" / "tessera"
    assert data_folder(str(tmp_path / "given")) == tmp_path / "given"
    assert data_folder("none") is None
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--data-dir .* cannot be used"):
        data_folder(str(tmp_path / "file"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert data_folder(None) is None
