"""A sequence whose prefix is being copied back waits in a state of its own, and the others go on."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest

from tessera.engine.core.sequence import SequenceStatus
from tessera.engine.kv_tiers.disk_tier import DiskTier
from tessera.engine.kv_tiers.metrics import TierMetrics
from tessera.engine.kv_tiers.tiers import MAX_READ_SECONDS, KVTiers, Parts
from tests.support.fakes.fake_runner import CLIENT, NON_FINITE, FakeRunner, Harness, generate
from tests.support.fakes.fake_tiers import FakeCopies, LateExecutor, LateMark, MemoryFiles, check_tiers_quiet

PROMPT = [*range(1, 41), 50]
OTHERS = [[number + 60] * 41 for number in range(4)]


class HeldCopies(FakeCopies):
    """Copies to the device are done when `is_held` is False, or when a step waits for them."""

    is_held = False

    def to_device(self, *arguments: Any, **options: Any) -> LateMark:
        mark = super().to_device(*arguments, **options)
        query = mark.query
        mark.query = lambda: mark.is_done if self.is_held else query()  # type: ignore[method-assign]
        return mark


class Engine(Harness):
    """An engine that has evicted PROMPT's blocks."""

    def __init__(self, num_slots: int = 100, parts: Parts | None = None, **settings: Any) -> None:
        rng = random.Random(1)

        def make_tiers(runner: FakeRunner) -> KVTiers:
            self.copies = HeldCopies(rng, runner.planes, num_slots)
            return KVTiers(self.copies, parts=parts, sleep=lambda seconds: None)

        super().__init__(
            num_blocks=24, block_size=4, max_num_seqs=3, asynchronous=True, make_tiers=make_tiers, **settings
        )
        self.add("first", PROMPT, 2)
        self.run()
        for number, prompt in enumerate(OTHERS):
            self.add(f"other{number}", prompt, 2)
            self.run()
        self.copies.is_held = True

    @property
    def loading(self) -> list[str]:
        return [sequence.request_id for sequence in self.core.scheduler.loading]


def test_others_run_while_a_prefix_is_copied_back() -> None:
    engine = Engine()
    engine.add("short", [3, 4, 5], 30, ignore_eos=True)
    engine.step()
    engine.add("again", PROMPT, 4)
    for _ in range(10):
        engine.step()
    assert engine.loading == ["again"]
    (sequence,) = engine.core.scheduler.loading
    assert sequence.status is SequenceStatus.LOADING
    assert len(engine.token_ids["short"]) >= 9, "a token a step"
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    engine.copies.is_held = False
    engine.run()
    assert engine.token_ids["again"] == generate(PROMPT, 4)[0]
    assert engine.last_outputs["again"].num_cached_tokens == 40
    assert engine.tiers is not None
    assert (engine.tiers.metrics.num_hits, engine.tiers.metrics.num_queries) == (40, 40 * 6 + 2)
    check_tiers_quiet(engine.tiers)


def test_a_load_is_submitted_in_parts_beside_steps_and_at_once_without(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(parts=Parts(before_step=2, beside_decodes=1, beside_prompts=3))
    submitted: list[int] = []
    to_device = engine.copies.to_device

    def note(slots: Any, blocks: Any, after: Any, *, goes_on: bool = False) -> LateMark:
        assert goes_on is bool(submitted), "what follows the first part waits for no later step"
        submitted.append(len(slots))
        return to_device(slots, blocks, after, goes_on=goes_on)

    monkeypatch.setattr(engine.copies, "to_device", note)
    engine.add("short", [3, 4, 5], 30, ignore_eos=True)
    engine.step()
    engine.step()
    engine.add("again", PROMPT, 4)
    engine.step()
    assert submitted == [2, 1], "before the step and beside it"
    engine.add("other", [7, 7, 7], 20, ignore_eos=True)
    engine.step()
    assert submitted == [2, 1, 2, 3], "that step has a prompt"
    engine.step()
    assert submitted == [2, 1, 2, 3, 2]
    engine.copies.is_held = False
    engine.run()
    assert engine.token_ids["again"] == generate(PROMPT, 4)[0]
    assert engine.last_outputs["again"].num_cached_tokens == 40
    assert engine.tiers is not None
    check_tiers_quiet(engine.tiers)


def test_what_leaves_half_way_is_submitted_no_further() -> None:
    engine = Engine(parts=Parts(before_step=2, beside_decodes=1))
    engine.add("short", [3, 4, 5], 30, ignore_eos=True)
    engine.step()
    engine.step()
    engine.add("again", PROMPT, 4)
    engine.step()
    assert engine.tiers is not None
    copied = engine.tiers.metrics.num_bytes["CPU_to_GPU"]
    assert copied == 3 * engine.copies.slot_bytes
    engine.core.abort(["again"], CLIENT)
    for number in range(3):  # its blocks are written to anew
        engine.add(f"new{number}", [*range(70, 90), number], 3)
    engine.run()
    for number in range(3):
        assert engine.token_ids[f"new{number}"] == generate([*range(70, 90), number], 3)[0]
    assert engine.tiers.metrics.num_bytes["CPU_to_GPU"] == copied
    engine.copies.is_held = False
    check_tiers_quiet(engine.tiers)


def test_a_step_waits_for_the_part_that_has_its_block() -> None:
    engine = Engine(parts=Parts(stored=2))
    tiers = engine.tiers
    assert tiers is not None
    tiers.finish_copies()
    held: list[Any] = []
    tiers._hold_steps = held.append  # type: ignore[method-assign, assignment]
    blocks = [0, 1, 2, 3, 4]
    tail = tiers.save_tail(blocks, 0, 20)
    assert tail is not None
    tiers.claim(3)
    tiers.submit()
    assert [stored for _, stored, _ in tiers._storing] == [[0, 1], [2, 3], [4]]
    assert held == [tiers._busy[3]]
    assert tiers._busy[3] is not tiers._busy[1]
    tiers.drop_tail(tail)


def test_requests_with_the_same_prefix_wait_for_one_load() -> None:
    engine = Engine()
    for number in range(3):
        engine.add(f"again{number}", [*PROMPT, number], 4)
    for _ in range(4):
        engine.step()
    assert engine.loading == ["again0"]
    engine.copies.is_held = False
    engine.run()
    assert engine.tiers is not None
    assert engine.tiers.metrics.num_bytes["CPU_to_GPU"] == 10 * engine.copies.slot_bytes
    for number in range(3):
        assert engine.token_ids[f"again{number}"] == generate([*PROMPT, number], 4)[0]


def test_one_that_leaves_while_it_loads_leaves_nothing() -> None:
    engine = Engine()
    engine.add("again", PROMPT, 4)
    engine.step()
    assert engine.loading == ["again"]
    engine.core.abort(["again"], CLIENT)
    assert not engine.core.has_work
    assert engine.core.stats().num_used_blocks == 0
    for number in range(3):  # its blocks are written to, which the late copy must not spoil
        engine.add(f"new{number}", [70 + number] * 25, 4)
    engine.run()
    for number in range(3):
        assert engine.token_ids[f"new{number}"] == generate([70 + number] * 25, 4)[0]
    engine.copies.is_held = False
    assert engine.tiers is not None
    check_tiers_quiet(engine.tiers)


def test_a_loading_sequence_makes_way_for_running_ones() -> None:
    engine = Engine()
    engine.add("long", [5] * 30, 60, ignore_eos=True, priority=-1)
    engine.step()
    engine.add("again", PROMPT, 4)
    for _ in range(70):
        engine.step()
    assert "long" in engine.finish_reasons, "it needed blocks that the load had"
    engine.copies.is_held = False
    engine.run()
    assert engine.token_ids["again"] == generate(PROMPT, 4)[0]


def test_the_blocks_of_a_failed_request_leave_host_memory_too() -> None:
    engine = Engine()
    engine.copies.is_held = False
    prompt = [NON_FINITE, *range(1, 16)]  # its logits are not finite at a length of 21
    engine.add("short", prompt, 3, ignore_eos=True)
    engine.run()
    for number, other in enumerate(OTHERS):
        engine.add(f"more{number}", [*other, 1], 2)
        engine.run()
    engine.add("failing", prompt, 30, ignore_eos=True)
    engine.run()
    assert engine.finish_reasons["failing"] == "error"
    assert engine.last_outputs["failing"].num_cached_tokens == 12
    engine.add("after", prompt, 3, ignore_eos=True)
    engine.run()
    assert engine.last_outputs["after"].num_cached_tokens == 0


def test_a_disk_that_does_not_answer_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(LateExecutor):
        is_stuck = False

        def submit(self, function: Any, /, *arguments: Any) -> Any:
            return Future() if self.is_stuck else super().submit(function, *arguments)

    rng, now = random.Random(2), [0.0]
    reader = Stuck(rng)

    def make_tiers(runner: FakeRunner) -> KVTiers:
        metrics = TierMetrics()
        disk = DiskTier(MemoryFiles(rng), 100, metrics=metrics, reader=reader, writer=LateExecutor(rng))
        copies = FakeCopies(rng, runner.planes, 12)
        return KVTiers(copies, disk=disk, metrics=metrics, clock=lambda: now[0], sleep=lambda seconds: None)

    engine = Harness(num_blocks=14, block_size=4, make_tiers=make_tiers)
    engine.add("first", PROMPT, 2)
    engine.run()
    for number, prompt in enumerate(OTHERS):
        engine.add(f"other{number}", prompt, 2)
        engine.run()
    reader.is_stuck = True
    engine.add("again", PROMPT, 4)
    for _ in range(20):
        engine.step()
    assert engine.core.scheduler.loading
    now[0] = MAX_READ_SECONDS + 1
    engine.run()
    assert engine.token_ids["again"] == generate(PROMPT, 4)[0]
    engine.add("once more", PROMPT, 4)
    engine.run()
    assert engine.tiers is not None
    assert engine.tiers.metrics.failures == {"disk_stuck": 1}
    assert sum("does not answer" in record.getMessage() for record in caplog.records) == 1
