"""Work of large requests that once held up the engine's thread between two steps, and how much of it is left."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tessera.engine.contract.errors import EngineError
from tessera.engine.contract.messages import (
    NO_ACCOUNT,
    AccountRef,
    EmbeddingOutput,
    EngineMessage,
    PromptScores,
    RequestOutput,
    Sibling,
    StepOutputs,
    TokenLogprobs,
    rows_of,
)
from tessera.engine.contract.sampling_params import MAX_BAD_WORDS, Grammar, ReasoningBudget, SamplingParams
from tessera.engine.core import block_manager, core, prefixes_in_progress, scheduler
from tessera.engine.core.prompt_logprobs import keep_prompt_logprobs
from tessera.engine.grammar import token_tables
from tessera.engine.grammar.compiler import GrammarCompiler
from tessera.engine.grammar.constraint import TokenConstraint
from tessera.engine.grammar.token_tables import LongerBadWords, TokenTables
from tessera.engine.ipc import outbox
from tessera.engine.ipc.outbox import Outbox, VectorsOutbox
from tessera.engine.ipc.request_stream import Inbox
from tessera.engine.ipc.vectors_inbox import VectorsInbox
from tessera.engine.kv_tiers.published_block import PublishedBlock
from tessera.engine.runner.prompt_logprobs import read_prompt_logprobs
from tests.support.fakes.fake_runner import CLIENT, Harness
from tests.support.grammar_harness import EOS, MODEL, VOCAB_SIZE, GrammarHarness


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


def test_fault_stalls_a_cached_prompt_is_looked_for_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 131,000 tokens took 30 ms of the step in which it started."""
    monkeypatch.setattr(scheduler, "MAX_HASHED_BLOCKS", 30)
    engine = Harness(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024)
    prompt = long_prompt(1, 400)
    engine.add("first", prompt, 1)
    engine.run()
    hashed = count_digests(engine)
    compared: list[Any] = []
    holds = PublishedBlock.holds

    def counted(self: PublishedBlock, *args: Any) -> bool:
        compared.append(self)
        return holds(self, *args)

    monkeypatch.setattr(PublishedBlock, "holds", counted)
    engine.add("second", prompt, 2)
    (sequence,) = engine.core._sequences.values()
    num_steps = 0
    while not sequence.is_running:
        hashed.clear()
        compared.clear()
        engine.core.step()
        num_steps += 1
        assert len(hashed) <= 30 + 1, "and the root"
        assert len(compared) <= 30
    assert num_steps == 4
    engine.run()
    assert engine.last_outputs["second"].num_cached_tokens == 396


def test_fault_stalls_all_waiting_prompts_together_are_looked_for_in_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MAX_HASHED_BLOCKS", 100)
    engine = Harness(num_blocks=512, max_num_seqs=1, max_num_batched_tokens=256, max_model_len=1024)
    for number in range(3):
        engine.add(f"first{number}", long_prompt(number + 1, 241), 1)
    engine.run()
    engine.add("runs", long_prompt(9, 8), 5, ignore_eos=True)
    engine.step()
    for number in range(3):
        engine.add(f"again{number}", long_prompt(number + 1, 241), 1)
    again = [each for each in engine.core._sequences.values() if each.request_id != "runs"]
    found: list[list[int]] = []
    for _ in range(3):
        engine.core.scheduler._num_hashed = 0
        for each in again:
            if engine.core.scheduler._num_hashed < 100:
                engine.core.scheduler._match(each)
        found.append([len(each.matched) for each in again])
    assert found == [[60, 24, 0], [60, 60, 32], [60, 60, 60]], "a look counts as 16"


def test_fault_stalls_a_prompt_is_hashed_in_several_steps_beside_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for what that one computes, and 8,000 blocks took 20 ms to find out."""
    monkeypatch.setattr(scheduler, "MAX_HASHED_BLOCKS", 40)
    engine = Harness(num_blocks=512, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024)
    head = long_prompt(1, 81)
    engine.add("cached", head, 1)
    engine.run()
    engine.add("runs", long_prompt(2, 300), 1)
    engine.step()
    engine.add("waits", [*head[:80], *long_prompt(3, 201)], 1)
    waits = engine.core._sequences[CLIENT, "waits"]
    looks: list[tuple[bool, int, int]] = []
    for _ in range(2):
        engine.core.scheduler._num_hashed = 0
        _, is_early = engine.core.scheduler._match(waits)
        looks.append((is_early, len(waits.block_digests), engine.core.scheduler._num_hashed))
    assert looks == [(True, 40, 16 + 40), (False, 70, 16 + 30)]


def test_fault_stalls_a_long_prompt_is_indexed_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 131,000 tokens took 20 ms beside its first step. Others wait for what is known of it."""
    monkeypatch.setattr(prefixes_in_progress, "MAX_INDEXED_BLOCKS", 20)
    engine = Harness(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=1024)
    hashed = count_digests(engine)
    prompt = long_prompt(1, 400)
    engine.add("first", prompt, 1)
    for number in range(3):
        hashed.clear()
        engine.step()
        assert len(hashed) == 20 + (not number), "and the root"
    engine.add("second", [*prompt[:300], 5], 1)
    second = engine.core._sequences[CLIENT, "second"]
    assert engine.core.scheduler._match(second)[1], "it waits"
    assert second.awaited_digest == second.block_digests[59]
    engine.run()
    assert engine.last_outputs["second"].num_cached_tokens == 300
    assert not engine.core.scheduler._prefixes._owners


def test_fault_stalls_prompts_are_indexed_in_turn_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes_in_progress, "MAX_INDEXED_BLOCKS", 20)
    engine = Harness(num_blocks=512, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024)
    prefixes = engine.core.scheduler._prefixes

    def num_indexed() -> list[int]:
        """Blocks of each, in one more step."""
        prefixes.begin_step()
        prefixes.index_running()
        names = [owner.request_id for owner in prefixes._owners.values()]
        return [names.count(str(number)) for number in range(3)]

    for number in range(3):
        engine.add(str(number), long_prompt(number + 1, 101), 9, ignore_eos=True)
    engine.core.schedule()
    assert [num_indexed(), num_indexed()] == [[25, 15, 0], [25, 25, 10]]
    engine.core.abort(["1", "2"], CLIENT)
    assert num_indexed() == [25, 0, 0]


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


def test_fault_stalls_a_full_prefix_cache_is_reset_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 blocks took 24 ms. Nothing of them is found from the first moment on."""
    monkeypatch.setattr(block_manager, "MAX_RESET", 20)
    engine = Harness(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=512)
    manager = engine.core.block_manager
    engine.add("cached", long_prompt(1, 160), 1, ignore_eos=True)
    engine.run()
    num_cached = sum(map(manager.is_published, range(64)))
    assert num_cached == 40
    engine.core.reset_prefix_cache()
    assert sum(map(manager.is_published, range(64))) >= num_cached - 20
    engine.add("again", long_prompt(1, 160), 1, ignore_eos=True)
    num_left = []
    while engine.core.has_work:
        num_before = sum(map(manager.is_published, range(64)))
        for output in engine.core.step().get(CLIENT, []):
            assert output.num_cached_tokens == 0
        engine.check_blocks()
        num_left.append(sum(map(manager.is_published, range(64))))
        assert num_left[-1] >= num_before - 20
    assert len(num_left) > 2, "it was not done at once"
    engine.add("third", long_prompt(1, 160), 1, ignore_eos=True)
    engine.run()
    assert engine.last_outputs["third"].num_cached_tokens > 0, "what was computed since is found"


def test_fault_stalls_resets_that_come_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "MAX_RESET", 1)
    manager = Harness(num_blocks=64).core.block_manager
    for account in range(100):
        manager.reset([account])
    num_steps = 0
    while manager.is_resetting:
        manager.release_more()
        num_steps += 1
    assert num_steps <= 2 * (64 + 1)


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


def test_fault_stalls_scores_of_a_long_prompt_are_sent_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """22 MB for 131,000 tokens took the engine's thread 16 to 33 ms in one message, and the event loop as long."""
    piece = PromptScores.of([TokenLogprobs(number, -0.5, 1, [number, 2], [-0.5, -1.0]) for number in range(10)])
    monkeypatch.setattr(outbox, "MAX_BYTES", 3 * piece.num_bytes)
    box, inboxes = Outbox(), {name: Inbox() for name in ("small", "a", "b", "plain", "gone")}
    sizes: list[int] = []

    def send(outputs: list[RequestOutput]) -> None:
        sizes.append(sum(len(each.prompt_logprobs or []) for each in outputs))
        for output in outputs:
            assert not inboxes[output.request_id].ended
            inboxes[output.request_id].deliver(output)

    def take() -> None:
        for outputs in box.take().values():
            send(outputs)

    def scored(name: str, count: int) -> RequestOutput:
        return RequestOutput(name, [1], prompt_logprobs=[piece] * count)

    send(box.put(CLIENT, [scored("small", 2), scored("a", 10), scored("b", 4), RequestOutput("plain", [1])]))
    send(box.put(CLIENT, [RequestOutput(name, [2], finish_reason="length") for name in ("a", "plain")]))
    send(box.put(CLIENT, [scored("gone", 9)]))
    assert sizes == [2, 0, 0]
    assert [name for name, inbox in inboxes.items() if inbox.output is not None] == ["small", "plain"]
    take()
    take()
    assert inboxes["a"].accepted
    assert inboxes["a"].output is None, "its first token comes with the last scores"
    box.drop(CLIENT, ["gone", "unknown"])
    while box:
        take()
    assert max(sizes) == 3
    for name, count, tokens in (("small", 2, [1]), ("a", 10, [1, 2]), ("b", 4, [1])):
        output = inboxes[name].output
        assert output is not None
        assert (output.token_ids, output.prompt_logprobs) == (tokens, [piece] * count), name
    assert inboxes["a"].ended
    assert inboxes["gone"].output is None


def test_fault_stalls_vectors_of_megabytes_are_sent_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """33 MB for 2,048 texts of a model of 4,096 dimensions took the engine's thread 60 to 200 ms in one message."""
    monkeypatch.setattr(outbox, "MAX_BYTES", 8)
    contents = {"small": bytes(8), "a": bytes(range(30)), "b": bytes(range(100, 117)), "gone": bytes(99)}

    async def received() -> None:
        box = VectorsOutbox()
        inboxes = {name: VectorsInbox(asyncio.get_running_loop()) for name in contents}
        order: list[str] = []

        def send(output: EmbeddingOutput) -> None:
            order.append(output.request_id)
            inboxes[output.request_id].deliver(output)

        def take() -> None:
            """A turn."""
            taken = list(box.take())
            assert sum(len(output.vectors) for _, output in taken) <= 8
            for client, output in taken:
                assert client == CLIENT
                send(output)

        for name, vectors in contents.items():
            box.put(CLIENT, EmbeddingOutput(name, memoryview(vectors)))
        take()
        assert order == ["small"]
        for _ in range(3):
            take()
        box.drop(b"another", ["a"])
        box.drop(CLIENT, ["gone", "unknown"])
        while box:
            take()
        assert order == ["small", "a", "b", "gone", "a", "b", "a", "b", "a"]
        for name in ("small", "a", "b"):
            assert bytes(await inboxes[name].whole) == contents[name]
        assert not inboxes["gone"].whole.done()
        inboxes["gone"].fail(EngineError("it has died"))
        inboxes["a"].fail(EngineError("too late"))
        with pytest.raises(EngineError, match="it has died"):
            await inboxes["gone"].whole

    asyncio.run(received())


def test_fault_stalls_what_constrains_tokens_is_worked_out_once_for_all_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 choices with the widest allowed ids took 25 ms, a mask of the whole vocabulary for each."""
    made: list[int] = []
    make = token_tables.token_words

    def counted(token_ids: Any, vocab_size: int) -> Any:
        made.append(len(token_ids))
        return make(token_ids, vocab_size)

    monkeypatch.setattr(token_tables, "token_words", counted)
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS])
    grammar, budget = Grammar("regex", "[ab]*"), ReasoningBudget(30, 5)
    for fields in ({"allowed_token_ids": (5, 6)}, {"reasoning_budget": budget}, {"grammar": grammar}):
        made.clear()
        engine = GrammarHarness(compiler)
        engine.add("first", siblings=siblings(20), max_tokens=5, **fields)
        engine.run()
        assert len(made) <= 6, fields
    compiler.close()


def test_fault_stalls_bad_words_that_all_match_are_worked_out_once_for_all_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 that all ended 1,024 sequences took 100 ms of a step, 140 where the sequences ended in different ones."""
    params = SamplingParams(max_tokens=1, bad_words=tuple((5,) * (2 + number) for number in range(MAX_BAD_WORDS)))
    tables = TokenTables(params, 100_000)
    looked: list[int] = []
    last_tokens = LongerBadWords.last_tokens

    def counted(self: LongerBadWords, begun: int) -> Any:
        looked.append(begun)
        return last_tokens(self, begun)

    monkeypatch.setattr(LongerBadWords, "last_tokens", counted)
    constraints = [TokenConstraint(params, 100_000, tables) for _ in range(1024)]
    for constraint in constraints:
        constraint.consume(7)
    assert len({id(constraint.mask) for constraint in constraints}) == 1
    assert not looked
    for step in range(12):
        looked.clear()
        for number, constraint in enumerate(constraints):
            constraint.consume(5 if number % 4 or step % 4 else 7)
        assert len(looked) <= 2
    assert constraints[1].mask[0] == 2**32 - 1 - 2**5
    assert len({id(constraint.mask) for constraint in constraints}) == 2


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_are_those_that_the_text_has_begun(seed: int) -> None:
    numbers = random.Random(seed)
    words = {tuple(numbers.choices((1, 2, 40), k=numbers.randint(1, 5))) for _ in range(numbers.randint(1, 30))}
    allowed = None if seed % 2 else (1, 2, 5, 40)
    params = SamplingParams(max_tokens=1, bad_words=tuple(sorted(words)), allowed_token_ids=allowed)
    constraint = TokenConstraint(params, 64)
    text: list[int] = []
    for token_id in numbers.choices((1, 2, 40, 5), k=60):
        forbidden = {word[-1] for word in words if text[len(text) - len(word) + 1 :] == [*word[:-1]]}
        bits = np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits).tolist()) == set(allowed or range(64)) - forbidden, text
        constraint.consume(token_id)
        text.append(token_id)


def test_fault_stalls_only_so_many_grammars_begin_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 1,024 choices were all begun as soon as it had compiled."""
    monkeypatch.setattr(core, "MAX_CONSTRAINED", 4)
    compiler = GrammarCompiler(MODEL, VOCAB_SIZE, [EOS])
    engine = GrammarHarness(compiler)
    engine.add("first", Grammar("regex", "[ab]*"), siblings=siblings(10), max_tokens=5)
    left = [len(engine.core._compiling)]
    while left[-1]:
        engine.core.step()
        left.append(len(engine.core._compiling))
        assert left[-2] - left[-1] in (0, 4, 3)
    engine.run()
    compiler.close()


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
