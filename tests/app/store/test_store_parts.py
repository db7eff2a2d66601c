"""The parts of the store alone: contents, database, locks and the folder."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.app.store import contents as contents_module
from tessera.app.store import database as database_module
from tessera.app.store import errors as errors_module
from tessera.app.store.contents import ABANDONED_AFTER, Contents
from tessera.app.store.database import Database
from tessera.app.store.errors import StoreFullError, StoreQuotaError, StoreUnavailableError, store_errors
from tessera.app.store.folder import data_folder
from tessera.app.store.locks import ProcessLocks
from tessera.app.store.objects import OBJECTS, ObjectTable, StoreLimits
from tessera.app.store.schema import Schema, migrate
from tessera.engine.contract.errors import EngineError
from tests.support.processes.descriptors import num_open

NO_LIMITS = StoreLimits(10**9, None)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "store.sqlite", [OBJECTS])
    yield opened
    opened.close()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# ---- contents -----------------------------------------------------------------------------------


def test_a_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents, synced = Contents(tmp_path / "files"), []

    def sync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        synced.append((path, sorted(os.listdir(path)) if os.path.isdir(path) else Path(path).read_bytes()))

    monkeypatch.setattr(os, "fsync", sync)
    assert mode(tmp_path / "files") == 0o700
    before = num_open(tmp_path)
    incoming = contents.begin()
    (unfinished,) = (tmp_path / "files").iterdir()
    assert unfinished.suffix == ".part"
    incoming.write(b"abc")
    incoming.write(b"de")
    assert incoming.num_bytes == 5
    incoming.publish("a-1_b")
    assert num_open(tmp_path) == before
    assert synced == [(str(unfinished), b"abcde"), (str(tmp_path / "files"), ["a-1_b"])]
    incoming.discard()
    assert contents.path("a-1_b").read_bytes() == b"abcde", "what is published stays"
    other = contents.begin()
    other.discard()
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["a-1_b"]
    assert num_open(tmp_path) == before
    with pytest.raises(AssertionError):
        contents.path("../a")
    Contents(tmp_path / "files")  # it may be there already


@pytest.mark.parametrize("has_links", [True, False])
def test_a_content_has_two_names_of_which_either_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    contents = Contents(tmp_path)
    contents.path("a").write_bytes(b"text")
    os.utime(contents.path("a"), (0, 0))
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    contents.link("a", "b")
    assert (contents.path("b").stat().st_ino == contents.path("a").stat().st_ino) == has_links
    assert contents.path("b").stat().st_mtime > time.time() - 60, "as new as the link, so that no sweep takes it"
    contents.remove("a", "nothing")
    assert contents.path("b").read_bytes() == b"text"
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        contents.link("a", "c")


def test_a_sweep_takes_what_is_older_than_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents, now = Contents(tmp_path), 10**9
    monkeypatch.setattr(contents_module, "time", SimpleNamespace(time=lambda: now))
    assert ABANDONED_AFTER == 24 * 3600
    for name, age in (("old", 86401), ("old.part", 86401), ("kept", 86401), ("young", 86400), ("young.part", 86400)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, now - age))
    asked: list[list[str]] = []

    def unknown(names: list[str]) -> list[str]:
        asked.append(sorted(names))
        return ["old"]

    contents.sweep(unknown)
    assert asked == [["kept", "old"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "young", "young.part"]


# ---- database -----------------------------------------------------------------------------------


def test_the_database_is_the_users_own_and_survives_kill_9(tmp_path: Path, database: Database) -> None:
    assert mode(tmp_path / "store.sqlite") == 0o600
    expected = {"journal_mode": "wal", "auto_vacuum": 2, "synchronous": 1, "foreign_keys": 1}
    for pragma, value in {**expected, "journal_size_limit": 64 * 2**20}.items():
        assert database.query(lambda db, name=pragma: db.execute(f"PRAGMA {name}").fetchone()) == (value,)  # type: ignore[misc]


def test_a_database_that_cannot_be_opened_leaves_no_descriptors(tmp_path: Path) -> None:
    newer = Database(tmp_path / "newer.sqlite", [Schema("pets", (("CREATE TABLE pets (name TEXT)",),))])
    newer.close()
    (tmp_path / "damaged.sqlite").write_bytes(b"not a database" * 100)
    before = num_open(tmp_path)
    cases: list[tuple[str, Schema, type[Exception]]] = [
        ("newer", Schema("pets", ()), StoreUnavailableError),
        ("damaged", OBJECTS, sqlite3.DatabaseError),
    ]
    for name, schema, error in cases:
        with pytest.raises(error) as raised:
            Database(tmp_path / f"{name}.sqlite", [schema])
        assert num_open(tmp_path) == before, f"{raised.value}, and whatever holds on to that"


def test_a_query_sees_one_state_and_a_change_is_whole(tmp_path: Path, database: Database) -> None:
    other = Database(tmp_path / "store.sqlite", [OBJECTS])
    table = ObjectTable("note", NO_LIMITS, max_count=9, max_bytes=99, evicts=False)

    def look_twice(db: sqlite3.Connection) -> list[tuple[int, int]]:
        first = table.usage(db, "t")
        other.transact(lambda written: table.insert(written, "t", "a", b"x"))
        return [first, table.usage(db, "t")]

    assert database.query(look_twice) == [(0, 0), (0, 0)]
    assert database.query(lambda db: table.usage(db, "t")) == (1, 1)

    def fail(db: sqlite3.Connection) -> None:
        table.insert(db, "t", "b", b"x")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        database.transact(fail)
    assert database.transact(lambda db: table.usage(db, "t")) == (1, 1)
    with pytest.raises(ZeroDivisionError):
        database.query(fail)
    assert database.transact(lambda db: table.usage(db, "t")) == (1, 1), "a query that wrote has changed nothing"
    connection = database._connection()
    other.close()
    database.close()
    with pytest.raises(sqlite3.ProgrammingError):
        connection.execute("SELECT 1")


def test_each_thread_has_a_connection_and_any_may_close_all(database: Database) -> None:
    connections = [database._connection(), database._connection()]
    thread = threading.Thread(target=lambda: connections.append(database._connection()))
    thread.start()
    thread.join()
    assert connections[0] is connections[1] is not connections[2]
    database.close()
    for connection in connections:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            connection.execute("SELECT 1")


def test_unused_pages_go_back_so_many_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_unused() -> int:
        found: tuple[int] = database.query(lambda db: db.execute("PRAGMA freelist_count").fetchone())
        return found[0]

    table = ObjectTable("wide", NO_LIMITS, max_count=9, max_bytes=10**9, evicts=False)
    database.transact(lambda db: table.insert(db, "t", "a", bytes(40 * 4096)))
    database.transact(lambda db: table.delete(db, "t", "a"))
    unused = num_unused()
    assert unused >= 40
    monkeypatch.setattr(database_module, "SPARE_PAGES", unused)
    database.give_back_space()
    assert num_unused() == unused
    monkeypatch.setattr(database_module, "SPARE_PAGES", 10)
    monkeypatch.setattr(database_module, "VACUUM_PAGES", unused - 15)
    database.give_back_space()
    assert num_unused() == 15
    database.give_back_space()
    assert num_unused() == 10


def test_tables_that_cannot_be_made_leave_no_transaction_open(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    migrate(connection, [Schema("pets", (("CREATE TABLE pets (name TEXT)",),))])
    with pytest.raises(StoreUnavailableError, match="newer version"):
        migrate(connection, [Schema("pets", ())])
    assert not connection.in_transaction
    connection.close()


def test_tables_that_are_up_to_date_are_not_written(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    first, second = ("CREATE TABLE pets (name TEXT)",), ("ALTER TABLE pets ADD COLUMN age INTEGER",)
    migrate(connection, [Schema("pets", (first,))])
    migrate(connection, [Schema("pets", (first, second))])
    num_changes = connection.total_changes
    migrate(connection, [Schema("pets", (first, second))])
    assert connection.total_changes == num_changes, "each of many processes starts so"
    assert connection.execute("SELECT * FROM schemas").fetchall() == [("pets", 2)]
    connection.close()


# ---- what fails ---------------------------------------------------------------------------------


def test_a_disk_that_fails_is_said_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(errors_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(errors_module, "_logged_at", {})
    faults: list[tuple[Exception, type[EngineError], str]] = [
        (OSError(errno.EIO, "bad block"), StoreUnavailableError, "cannot be read or changed just now"),
        (OSError(errno.ENOSPC, "full"), StoreFullError, "no space left"),
        (sqlite3.OperationalError("disk I/O error"), StoreUnavailableError, "cannot be read or changed just now"),
        (sqlite3.OperationalError("database or disk is full"), StoreFullError, "no space left"),
    ]

    def fail() -> list[str]:
        caplog.clear()
        for fault, error, message in faults:
            with pytest.raises(error, match=message), store_errors():
                raise fault
        return [record.message for record in caplog.records]

    said = fail()
    assert said == [
        "the data folder: [Errno 5] bad block",
        "the data folder: [Errno 28] full",
        "the data folder's database: disk I/O error",
        "the data folder's database: database or disk is full",
    ]
    clock[0] = 1060.0
    assert fail() == []
    clock[0] = 1060.5
    assert fail() == said
    assert (StoreUnavailableError().status, StoreFullError().status, StoreQuotaError().status) == (503, 507, 400)


# ---- locks and the folder -----------------------------------------------------------------------


def test_locks_are_numbered_and_are_let_go_of(tmp_path: Path) -> None:
    locks = ProcessLocks(tmp_path / "locks")
    assert mode(tmp_path / "locks") == 0o600
    assert locks.try_lock(0)
    assert locks.try_lock(1)
    locks.wait_for(5)
    assert held_by_this_process(tmp_path / "locks") == {0, 1, 5}
    locks.unlock(0)
    assert held_by_this_process(tmp_path / "locks") == {1, 5}
    locks.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        locks.try_lock(1)
    locks.unlock(5)  # it is gone already


@pytest.mark.parametrize("code", [errno.EACCES, errno.EAGAIN])
def test_a_lock_that_another_process_has_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    locks = ProcessLocks(tmp_path / "locks")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", refuse)  # POSIX lets a system choose between the two
        assert locks.try_lock(0) is False
    assert locks.try_lock(0) is True
    locks.close()


def held_by_this_process(path: Path) -> set[int]:
    inode = path.stat().st_ino
    held = set()
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "POSIX" and fields[5].endswith(f":{inode}") and int(fields[4]) == os.getpid():
            held |= set(range(int(fields[6]), int(fields[7]) + 1))
    return held


def test_where_the_data_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    found = data_folder(None)
    assert found == tmp_path / ".local" / "state" / "tessera"
    assert mode(found) == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert data_folder(None) == found, "a relative path is not valid"
    assert data_folder("~/a/b") == tmp_path / "a" / "b"
    assert data_folder("~/a/b") == tmp_path / "a" / "b", "it may be there already"
