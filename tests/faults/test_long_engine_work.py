"""Work of large requests that once held up the engine's thread between two steps, and how much of it is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tessera.engine.contract.messages import (
    NO_ACCOUNT,
    AccountRef,
    EngineMessage,
    PromptScores,
    RequestOutput,
    Sibling,
    StepOutputs,
    TokenLogprobs,
    rows_of,
)
from tessera.engine.core import block_manager, scheduler
from tessera.engine.core.prompt_logprobs import keep_prompt_logprobs
from tessera.engine.kv_tiers.published_block import PublishedBlock
from tessera.engine.runner.prompt_logprobs import read_prompt_logprobs
from tests.support.fake_runner import CLIENT, Harness


def long_prompt(first: int, length: int) -> list[int]:
    return [first, *(number % 97 + 1 for number in range(length - 1))]


def siblings(count: int) -> list[Sibling]:
    return [Sibling(f"s{number}", number, 5, 0, None) for number in range(count)]


def count_digests(engine: Harness) -> list[bytes]:
    """-> what is hashed from now on."""
    hashed: list[bytes] = []
    digest = engine.core.block_manager._digest

    def counted(data: bytes) -> bytes:
        hashed.append(data)
        return digest(data)

    engine.core.block_manager._digest = counted
    return hashed


def test_fault_stalls_a_prompt_is_hashed_once_for_all_its_choices() -> None:
    """A thousand choices of 2,000 tokens took 250 ms of one step, and 32 beside a long prompt each took 10 ms."""
    engine = Harness(num_blocks=512, block_size=4, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=512)
    hashed = count_digests(engine)
    engine.add("first", long_prompt(1, 200), 5, siblings=siblings(40), ignore_eos=True)
    engine.run()
    assert len(engine.finish_reasons) == 41
    num_blocks = 200 // 4
    assert len(hashed) < num_blocks + 41 * 4, "some blocks of completions, and roots"


def test_fault_stalls_choices_copy_their_prompt_as_they_start() -> None:
    """All copies of a prompt of 131,000 tokens for 128 choices took 66 ms, and their memory while they waited."""
    engine = Harness(max_num_seqs=2)
    engine.add("first", long_prompt(1, 30), 5, siblings=siblings(5), ignore_eos=True)
    sequences = list(engine.core._sequences.values())
    assert len({id(each.token_ids) for each in sequences}) == 1
    engine.step()
    running = [each for each in sequences if each.is_running]
    assert running
    assert len({id(each.token_ids) for each in sequences}) == 1 + len(running)
    engine.run()
    assert {len(tokens) for tokens in engine.token_ids.values()} == {5}


@pytest.mark.parametrize("is_shared", [False, True])
def test_fault_stalls_only_so_many_blocks_of_waiting_prompts_are_hashed_in_a_step(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """Long prompts that wait for a short one with the same beginning took 10 ms each, all in one step."""
    monkeypatch.setattr(scheduler, "MAX_HASHED_BLOCKS", 100)
    engine = Harness(num_blocks=1024, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=512)
    hashed = count_digests(engine)
    head = long_prompt(1, 24)
    engine.add("short", head, 3)
    if is_shared:
        engine.add("of another", [5] * 20, 3, account=AccountRef(2))
        engine.step()
    for number in range(20):
        engine.add(f"long{number}", head + long_prompt(number + 2, 300), 3)
    if is_shared:
        engine.core.scheduler._num_hashed = 0
        engine.core.scheduler._next_ready()
    else:
        engine.step()
    assert len(hashed) < 100 + 2 * 81
    engine.run()
    assert len(engine.finish_reasons) == 21 + is_shared


def test_fault_stalls_a_cached_prefix_is_compared_once_while_its_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 131,000 tokens that waits behind another key's requests took 70 ms of each step."""
    engine = Harness(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024)
    prompt = long_prompt(1, 400)
    ours, theirs = AccountRef(1), AccountRef(2)
    engine.add("first", prompt, 1, account=ours)
    engine.run()
    engine.add("other", long_prompt(2, 560), 40, account=theirs, ignore_eos=True)
    engine.step()
    compared: list[Any] = []
    holds = PublishedBlock.holds

    def counted(self: PublishedBlock, *args: Any) -> bool:
        compared.append(self)
        return holds(self, *args)

    monkeypatch.setattr(PublishedBlock, "holds", counted)
    engine.add("second", [*prompt, *long_prompt(3, 300)], 2, account=ours)
    for _ in range(10):
        engine.step()
    waiting = [each for each in engine.core._sequences.values() if each.request_id == "second"]
    assert not waiting[0].has_seat, "there is no room yet"
    assert len(compared) <= 100 + 10 * 2 + 140, "the prefix once, and what the other one publishes"
    engine.run()
    assert engine.last_outputs["second"].num_cached_tokens > 0


def test_fault_stalls_only_so_many_waiting_sequences_are_looked_at_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 choices took 30 ms of the step in which all of them began to wait for the first."""
    engine = Harness(num_blocks=256, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=512)
    monkeypatch.setattr(scheduler, "MAX_HASHED_BLOCKS", 10 * scheduler.BLOCKS_OF_A_LOOK)
    looked_at: list[Any] = []
    match = engine.core.block_manager.match_prefix

    def counted(sequence: Any) -> Any:
        looked_at.append(sequence)
        return match(sequence)

    monkeypatch.setattr(engine.core.block_manager, "match_prefix", counted)
    engine.add("first", long_prompt(1, 60), 5, siblings=siblings(50), ignore_eos=True)
    engine.step()
    assert len(looked_at) <= 10
    engine.run()
    assert len(engine.finish_reasons) == 51


@pytest.mark.parametrize("how", ["abort", "end"])
def test_fault_stalls_blocks_of_many_sequences_are_released_in_several_steps(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """256 sequences with a common prompt of 100,000 tokens took 270 ms when they were aborted."""
    monkeypatch.setattr(block_manager, "MAX_RELEASED", 100)
    engine = Harness(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)
    engine.core.block_manager.release_more()
    engine.add("first", long_prompt(1, 200), 20, siblings=siblings(7), ignore_eos=True, account=NO_ACCOUNT)
    names = ["first", *(f"s{number}" for number in range(7))]
    while len(engine.core.scheduler.running) < len(names):
        engine.step()
    if how == "abort":
        engine.core.abort(names, CLIENT)
        engine.check_blocks()
    num_left = []
    while engine.core.has_work:
        num_before = sum(map(len, engine.core.block_manager.leaving))
        engine.core.step()
        engine.check_blocks()
        num_left.append(sum(map(len, engine.core.block_manager.leaving)))
        assert num_left[-1] >= num_before - 100
    assert max(num_left) > 100, "they did not go at once"
    assert engine.core.stats().num_used_blocks == 0


def test_fault_stalls_what_is_released_in_parts_can_be_had_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is preempted for want of blocks that are about to be free."""
    monkeypatch.setattr(block_manager, "MAX_RELEASED", 4)
    engine = Harness(num_blocks=64, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)
    engine.core.block_manager.release_more()
    engine.add("ends", long_prompt(1, 160), 40, ignore_eos=True)
    engine.add("stays", long_prompt(2, 40), 60, ignore_eos=True)
    while len(engine.core.scheduler.running) < 2:
        engine.step()
    engine.core.abort(["ends"], CLIENT)
    manager = engine.core.block_manager
    stays = engine.core.scheduler.running[0]
    assert manager.allocate(stays, 4 * 60)
    assert len(stays.block_table) == 60


def test_fault_stalls_scores_of_a_prompt_stay_bytes_until_they_are_shown() -> None:
    """131,000 tokens with 20 alternatives took the engine's thread 57 ms to encode, and 75 ms for each step of 8,192
    rows before; the event loop took 264 ms to decode them."""
    num_rows, vocab_size = 50, 70_000
    rng = np.random.default_rng(1)
    top_ids = rng.integers(0, vocab_size, (num_rows, 4)).astype(np.int32)
    top_values = -rng.random((num_rows, 4), np.float32)
    ids = rng.integers(0, vocab_size, num_rows).astype(np.int32)
    counts = np.array([4] * 20 + [2] * 20 + [0] * 10, np.int32)
    tensors = [(top_values[:, 0], ids, top_ids, top_values)]
    pieces = [tuple(of(array[first:stop]) for array in each) for each in tensors for first, stop in ((0, 30), (30, 50))]
    found = read_prompt_logprobs(cast(Any, pieces), ids, counts)
    assert [(len(each), each.num_top) for each in found] == [(20, 4), (10, 2), (10, 2), (10, 0)]
    assert rows_of(found) == [
        TokenLogprobs(*each, ids_of_row[:count].tolist(), values[:count].tolist())
        for each, ids_of_row, values, count in zip(
            zip(ids.tolist(), top_values[:, 0].tolist(), ids.tolist(), strict=True),
            top_ids,
            top_values,
            counts,
            strict=True,
        )
    ]
    message = StepOutputs("epoch", [RequestOutput("a", [1], prompt_logprobs=found)])
    data = msgspec.msgpack.encode(message)
    assert len(data) < sum(4 * (3 + 2 * count) for count in counts.tolist()) + 200
    assert msgspec.msgpack.Decoder(EngineMessage).decode(data) == message


def test_fault_stalls_scores_are_cut_to_the_sequences_that_asked() -> None:
    rows = [TokenLogprobs(number, -0.5, 1, [number, 2], [-0.5, -1.0]) for number in range(20)]
    pieces = [PromptScores.of(rows[:7]), PromptScores.of(rows[7:11]), PromptScores.of(rows[11:])]
    askers: list[Any] = [
        (SimpleNamespace(prompt_logprobs=kept), count) for kept, count in (([], 5), (None, 4), ([], 11))
    ]
    keep_prompt_logprobs(askers, pieces)
    assert rows_of(askers[0][0].prompt_logprobs) == rows[:5]
    assert rows_of(askers[2][0].prompt_logprobs) == rows[9:]


def of(array: Any) -> Any:
    """A tensor on the host."""
    return SimpleNamespace(numpy=lambda: array)
