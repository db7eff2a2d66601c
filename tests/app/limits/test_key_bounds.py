"""Keys, their file and their limits, each at its bound: what fits is accepted, and one more is refused."""

from __future__ import annotations

import os
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tessera.app.keys import keys_file
from tessera.app.keys.api_key import PREFIX, AcceptedKeys, ApiKey, KeyEntry, new_key
from tessera.app.keys.key_ring import KeyRing, account_of_owner
from tessera.app.keys.keys_file import MAX_KEYS, read_keys_file, with_slots, write_keys_file
from tessera.app.limits.key_metrics import KeyMetrics
from tessera.app.limits.key_use import WINDOW, Cell, KeyUse, Rate, duration
from tessera.app.limits.lease import Lease, RateLimitError
from tessera.app.limits.memory_watermark import LowMemoryError, MemoryWatermark
from tessera.app.limits.shared_memory import make_shared_memory, map_counts
from tessera.engine.contract.errors import ConfigError

SEED = 18


class Clock:
    def __init__(self, now: float = 6000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def entries(count: int) -> list[KeyEntry]:
    return [KeyEntry(name=f"k{number}", sha256=(f"{number:064x}",)) for number in range(count)]


def key(**fields: Any) -> ApiKey:
    return ApiKey(name="alice", sha256=("0" * 64,), slot=3, **fields)


# ---- entries and their file ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "fits", "refused"),
    [
        ("name", ["a", "a" * 64, "A.b_c@d-9"], ["", "a" * 65, "-a", "a b"]),
        ("sha256", [["0" * 64] * 8], [[], ["0" * 64] * 9, ["0" * 63], ["g" * 64]]),
        ("weight", [0.01, 100], [0.009, 100.5]),
        ("max_requests", [1, 2**40, None], [0, 2**40 + 1]),
        ("tokens_per_minute", [1, 2**40], [0, 2**40 + 1]),
    ],
)
def test_fields_of_an_entry_have_bounds(field: str, fits: list[Any], refused: list[Any]) -> None:
    whole = {"name": "alice", "sha256": ["0" * 64]}
    for value in fits:
        msgspec.convert({**whole, field: value}, KeyEntry)
    for value in refused:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**whole, field: value}, KeyEntry)


def test_a_key_may_do_nothing_more_than_its_entry_says() -> None:
    entry = KeyEntry(name="alice", sha256=("0" * 64,))
    assert (entry.weight, entry.may_use_priority, entry.may_administer) == (1.0, False, False)
    assert account_of_owner("alice", key()).max_waiting == 0, "no limit"
    assert not AcceptedKeys()
    assert AcceptedKeys(named=(key(),))
    assert len(new_key()) == len(PREFIX) + 43, "256 bits, six a character"


def test_as_many_keys_as_there_are_places_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys_file._check(entries(1024), file)
    with pytest.raises(ConfigError, match="1025 keys are more than the 1024"):
        write_keys_file(file, entries(1025))
    assert not file.exists()


def test_a_file_beyond_the_largest_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(b"#" * (2**22 + 1))
    with pytest.raises(ConfigError, match=f"more than {2**22} bytes"):
        read_keys_file(file)
    monkeypatch.setattr(keys_file, "MAX_BYTES", 100)
    file.write_bytes(b"#" * 100)
    assert read_keys_file(file) == ()
    file.write_bytes(b"#" * 101)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        read_keys_file(file)


@pytest.mark.parametrize(("content", "place"), [(b"a: 1\nkeys: [}", " line 2"), (b"keys: \xff", "")])
def test_the_line_is_named_where_there_is_one(tmp_path: Path, content: bytes, place: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_keys_file(file)
    assert str(raised.value) == f"--api-keys-file {file}{place} is neither YAML nor JSON"


def test_the_file_is_on_the_disk_before_it_takes_the_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced = tmp_path / "keys.yaml", []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.pread(fd, 2**20, 0)))
    write_keys_file(file, [KeyEntry(name="a", sha256=("0" * 64,), max_requests=3)])
    assert synced == [file.read_bytes()]
    text = file.read_text()
    assert text.startswith("# API keys")
    assert text.index("name:") < text.index("sha256:") < text.index("max_requests:")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml" / "full").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_keys_file(tmp_path / "keys.yaml", entries(1))
    assert [each.name for each in tmp_path.iterdir()] == ["keys.yaml"]
    with pytest.raises(ConfigError, match="the name k0 occurs twice"):
        write_keys_file(tmp_path / "other.yaml", entries(1) * 2)
    assert not (tmp_path / "other.yaml").exists()


def test_slots_of_names_that_left_are_used_again_when_no_others_are_free() -> None:
    all_of_them = entries(MAX_KEYS + 1)
    before = with_slots(all_of_them[:MAX_KEYS])
    assert [each.slot for each in before] == list(range(MAX_KEYS))
    after = with_slots([*all_of_them[:5], *all_of_them[6:]], before)
    slots = {each.name: each.slot for each in after}
    assert slots[f"k{MAX_KEYS}"] == 5
    assert slots == {**{each.name: each.slot for each in before if each.name != "k5"}, f"k{MAX_KEYS}": 5}
    few = with_slots(all_of_them[1:4], before[:2])
    assert [each.slot for each in few] == [1, 2, 3], "k0's slot keeps its counts as long as others are free"


# ---- counts -------------------------------------------------------------------------------------


def test_rates_of_all_processes_are_those_of_a_sliding_window() -> None:
    print(f"seed {SEED}")
    rng, clock, fd = random.Random(SEED), Clock(0.0), make_shared_memory("keys")
    processes = [KeyUse(fd, 3, part, clock) for part in range(3)]
    events: list[tuple[float, int, Rate, int]] = []

    def known(slot: int, rate: Rate, now: float) -> float:
        window, passed = int(now // WINDOW), now % WINDOW / WINDOW
        counts = [0, 0]
        for at, event_slot, event_rate, amount in events:
            if (event_slot, event_rate) == (slot, rate) and (age := window - int(at // WINDOW)) in (0, 1):
                counts[age] += amount
        return counts[0] + counts[1] * (1 - passed)

    for _ in range(120):
        clock.now += rng.choice((0.0, 1.0, 7.5, 30.0, 45.0, 60.0, 130.0))
        slot, rate, amount = rng.choice((4, 5)), rng.choice(list(Rate)), rng.randint(1, 50)
        rng.choice(processes).count_rate(slot, rate, amount)
        events.append((clock.now, slot, rate, amount))
        for slot in (3, 4, 5, 6):
            for rate in Rate:
                now = clock.now
                found = rng.choice(processes).in_last_minute(slot, rate)
                assert found == pytest.approx(known(slot, rate, now))
                most = rng.choice((-3.0, 0.0, found / 3, found / 2, found, found + 1))
                seconds = processes[0].seconds_until(slot, rate, most)
                assert (seconds == 0) == (found <= max(most, 0.0))
                assert known(slot, rate, now + seconds + 1e-6) <= max(most, 0.0) + 1e-3
                if seconds:
                    assert known(slot, rate, now + 0.999 * seconds - 1e-6) > most
    assert all(use.total(slot, cell) == 0 for use in processes for slot in range(8) for cell in Cell)


def test_counts_are_of_one_slot_and_one_cell() -> None:
    fd = make_shared_memory("keys")
    first, second = (KeyUse(fd, 2, part) for part in range(2))
    for slot in (0, 1, MAX_KEYS - 1):
        for cell in Cell:
            first.count(slot, cell)
            second.count(slot, cell, 10 * cell + 1)
    for use in (first, second):
        for slot in (0, 1, MAX_KEYS - 1):
            assert [use.total(slot, cell) for cell in Cell] == [10 * cell + 2 for cell in Cell]
        assert [use.total(2, cell) for cell in Cell] == [0] * len(Cell)
    restarted = KeyUse(fd, 2, 1)
    assert [restarted.total(1, cell) for cell in Cell] == [1, 1, 22, 32, 42, 52], "what was counted is kept"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (59.0, "59s"), (60.0, "1m0s"), (61.0, "1m1s"), (120.0, "2m0s"), (3600.0, "60m0s")],
)
def test_durations_are_in_minutes_from_the_first(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_metrics_are_of_named_keys_alone() -> None:
    use = KeyUse()
    assert list(KeyMetrics(None, use).collect("t")) == []
    assert list(KeyMetrics(KeyRing(AcceptedKeys(("plain",))), use).collect("t")) == []
    use.count(3, Cell.NUM_PROMPT_TOKENS, 7)
    families = list(KeyMetrics(KeyRing(AcceptedKeys((), (key(),))), use).collect("t"))
    samples = {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}
    assert samples["t:key_prompt_tokens_total"] == ({"key": "alice"}, 7)
    assert len(samples) == 6


# ---- one request's hold -------------------------------------------------------------------------


def refusal(work: Callable[[], object]) -> tuple[str, int]:
    with pytest.raises(RateLimitError) as raised:
        work()
    return str(raised.value), raised.value.retry_after


def test_as_many_requests_as_the_key_may_have_at_a_time() -> None:
    use = KeyUse(clock=Clock())
    leases = [Lease(key(max_requests=2), use) for _ in range(3)]
    leases[0].begin()
    leases[1].begin()
    assert refusal(leases[2].begin) == ("The key alice may have 2 requests at a time; please try again later.", 1)
    leases[2].end()
    assert use.total(3, Cell.REQUESTS_UNDER_WAY) == 2, "one that was refused gives nothing back"
    leases[0].end()
    leases[0].end()
    assert use.total(3, Cell.REQUESTS_UNDER_WAY) == 1, "a place comes back once"
    leases[2].begin()
    assert (use.total(3, Cell.NUM_REQUESTS), use.total(3, Cell.NUM_REFUSED)) == (3, 1)


def test_as_many_requests_a_minute_as_the_key_may_have() -> None:
    clock = Clock()
    use = KeyUse(clock=clock)
    for _ in range(4):
        Lease(key(requests_per_minute=4), use).begin()
    late = Lease(key(requests_per_minute=4, tokens_per_minute=10), use)
    assert dict(late.headers()) == {
        b"x-ratelimit-limit-requests": b"4",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"2m0s",
        b"x-ratelimit-limit-tokens": b"10",
        b"x-ratelimit-remaining-tokens": b"10",
        b"x-ratelimit-reset-tokens": b"0s",
    }
    clock.now += 30
    # The window's other half, and a quarter of the next, in which the four count for three.
    assert refusal(late.begin) == ("The key alice may have 4 requests a minute; please try again later.", 45)
    clock.now += 45
    late.begin()
    assert use.in_last_minute(3, Rate.REQUESTS) == 4


def test_as_many_tokens_and_sequences_as_the_key_may_have() -> None:
    clock = Clock()
    use = KeyUse(clock=clock)
    lease = Lease(key(tokens_per_minute=100, max_sequences=3), use)
    lease.begin()
    held = lease.hold_sequences(2, 60)
    assert (use.total(3, Cell.SEQUENCES_UNDER_WAY), use.total(3, Cell.NUM_PROMPT_TOKENS)) == (2, 60)
    assert refusal(lambda: lease.hold_sequences(2, 1))[0].startswith("The key alice may have 3 sequences at a time;")
    assert refusal(lambda: lease.hold_sequences(1, 41)) == (
        "The key alice may have 100 tokens a minute, and this request has 41; please try again later.",
        61,
    )
    assert use.total(3, Cell.SEQUENCES_UNDER_WAY) == 2, "what was refused holds nothing"
    other = lease.hold_sequences(1, 40)
    assert refusal(lease.begin)[0].startswith("The key alice may have 100 tokens a minute;")
    held.release(7)
    held.release(7)
    assert (use.total(3, Cell.SEQUENCES_UNDER_WAY), use.total(3, Cell.NUM_GENERATED_TOKENS)) == (1, 7)
    assert use.in_last_minute(3, Rate.TOKENS) == 107
    assert dict(lease.headers())[b"x-ratelimit-remaining-tokens"] == b"0", "it is never negative"
    del other
    assert use.total(3, Cell.SEQUENCES_UNDER_WAY) == 0, "one that is forgotten gives its places back"
    assert use.total(3, Cell.NUM_GENERATED_TOKENS) == 7


# ---- memory -------------------------------------------------------------------------------------


def test_memory_is_looked_at_again_after_its_interval() -> None:
    clock, looks = Clock(0.0), []
    free: list[int | None] = [9]

    def available() -> int | None:
        looks.append(clock.now)
        return free[0]

    clock.now = -1.0
    MemoryWatermark(10, available, clock).check()  # before the first look is due
    clock.now = 0.0
    watermark = MemoryWatermark(10, available, clock)
    with pytest.raises(LowMemoryError):
        watermark.check()
    free[0] = 10
    clock.now = 0.1
    with pytest.raises(LowMemoryError):
        watermark.check()
    clock.now = 0.2
    watermark.check()
    free[0] = None
    clock.now = 0.5
    watermark.check()
    assert looks == [0.0, 0.2, 0.5]


def test_a_thread_looks_at_memory_while_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.app.limits.memory_watermark.INTERVAL", 0.001)
    answers: queue.Queue[int | None] = queue.Queue()
    asked = threading.Semaphore(0)

    def available() -> int | None:
        asked.release()
        return answers.get(timeout=30)

    def after_a_look_that_finds(free: int | None) -> None:
        """The next look begins when this one's finding holds."""
        answers.put(free)
        assert asked.acquire(timeout=30)

    before = set(threading.enumerate())
    watermark = MemoryWatermark(10, available)
    answers.put(9)
    watermark.start()
    assert asked.acquire(timeout=30), "the start looks itself"
    assert asked.acquire(timeout=30)
    (thread,) = [each for each in threading.enumerate() if each.name == "memory watermark" and each not in before]
    assert thread.daemon, "a process that ends without a close does not wait for it"
    with pytest.raises(LowMemoryError):
        watermark.check()
    after_a_look_that_finds(10)
    watermark.check()
    after_a_look_that_finds(9)
    with pytest.raises(LowMemoryError):
        watermark.check()
    after_a_look_that_finds(None)
    watermark.check()
    answers.put(None)
    watermark.close()
    assert not thread.is_alive()


def test_memory_is_known_from_the_start_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.app.limits.memory_watermark.INTERVAL", 1000.0)
    watermark = MemoryWatermark(10, lambda: 9)
    watermark.start()
    with pytest.raises(LowMemoryError):
        watermark.check()
    watermark.close()


def test_without_a_bound_memory_is_not_watched() -> None:
    def available() -> int | None:
        raise AssertionError("memory was read")

    watermark = MemoryWatermark(0, available)
    watermark.start()
    watermark.check()
    watermark.close()


def test_counts_without_shared_memory_are_the_processs_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    file = make_shared_memory("counts")
    assert file is not None
    with open(file, "r+b"):
        allocated: list[tuple[int, ...]] = []
        allocate = os.posix_fallocate

        def note(*arguments: int) -> None:
            allocated.append(arguments)
            allocate(*arguments)

        monkeypatch.setattr(os, "posix_fallocate", note)
        counts = map_counts(file, 3)
        assert allocated == [(file, 0, 24)], "every page, from the first"
        assert list(counts) == [0, 0, 0]
        counts[2] = -5
        assert os.pread(file, 24, 0)[16:] == (-5).to_bytes(8, "little", signed=True)
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        own = map_counts(file, 4)
        assert list(own) == [0] * 4
        own[0] = 1
        assert os.pread(file, 8, 0) == bytes(8)
    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    assert make_shared_memory("metrics") is None
    assert [record.message for record in caplog.records] == [
        "this app process counts for itself alone: [Errno 12] Cannot allocate memory",
        "metrics are counted by each app process for itself: [Errno 12] Cannot allocate memory",
    ]
