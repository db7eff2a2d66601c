"""A model runner that computes nothing but notices every wrong block, and a harness that drives a core with it.

Its KV cache remembers, per cache slot, which token was stored there and at which position. The next
token is a hash of the whole context as read back through the block tables, so a wrong table, a block
freed too early or a false prefix hit fails an assertion or changes the output.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import (
    NO_ACCOUNT,
    AccountRef,
    AddRequest,
    PromptScores,
    RequestOutput,
    Sibling,
    TokenIds,
    TokenLogprobs,
    rows_of,
)
from tessera.engine.contract.sampling_params import ROW_PARAMETERS, SamplingParams
from tessera.engine.contract.sampling_row import SAMPLING_ROW
from tessera.engine.contract.speculation.settings import (
    DRAFT_TOKENS_OF,
    FOLDER_METHODS,
    MODEL_METHODS,
    STATE_METHODS,
)
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import BATCH_INVARIANT_ROWS, SlotInit, StepBatch, StepResult, TokenMask
from tessera.engine.kv_tiers.tiers import KVTiers
from tessera.engine.speculation.draft_keys import DraftLimits
from tests.support.fakes.fake_drafts import FakeDrafts
from tests.support.fakes.fake_tiers import check_tiers

VOCAB_SIZE = 100
EOS = 0
NON_FINITE = VOCAB_SIZE - 1  # a prompt that begins with this id gets non-finite logits, see next_token
POISON = -7
VOID = VOCAB_SIZE - 2
CLIENT = b"client"


def next_token(token_ids: np.ndarray[Any, Any]) -> int:
    """What the fake model says after these tokens; -1 for non-finite logits."""
    if token_ids[0] == NON_FINITE and len(token_ids) % 7 == 0:
        return -1
    return zlib.crc32(token_ids.astype(np.int32).tobytes()) % VOCAB_SIZE


def echo_token(token_ids: np.ndarray[Any, Any]) -> int:
    """A model that repeats itself, now and then in another way: some of what is drafted from its text comes true."""
    if token_ids[0] == NON_FINITE and len(token_ids) % 7 == 0:
        return -1
    return zlib.crc32(bytes([token_ids[-1] % 5, len(token_ids) // 9])) % 12 + 1


def score(before: np.ndarray[Any, Any], token_id: int, num_logprobs: int) -> TokenLogprobs:
    """What the fake model says of a prompt's token after these."""
    logprob = -zlib.crc32(before.astype(np.int32).tobytes() + bytes([token_id])) / 2**32
    return TokenLogprobs(token_id, float(np.float32(logprob)), 1, list(range(num_logprobs)), [-1.0] * num_logprobs)


def generate(
    prompt: list[int],
    max_tokens: int,
    *,
    stop_ids: Iterable[int] = (EOS,),
    min_tokens: int = 0,
    say: Callable[[np.ndarray[Any, Any]], int] = next_token,
) -> tuple[list[int], str]:
    """-> the tokens and the finish_reason of a request that is alone in the world."""
    token_ids = list(prompt)
    while True:
        token_id = say(np.array(token_ids, np.int32))
        num_before = len(token_ids) - len(prompt)
        if token_id < 0:
            return token_ids[len(prompt) :], "error"
        token_ids.append(token_id)
        if token_id in stop_ids and num_before >= min_tokens:
            return token_ids[len(prompt) :], "stop"
        if num_before + 1 == max_tokens:
            return token_ids[len(prompt) :], "length"


@dataclass
class Done:
    """A step that the fake has computed at once; its result is what the engine waits for."""

    outcome: StepResult
    drafted: np.ndarray[Any, np.dtype[np.int32]] | None = None

    def result(self) -> StepResult:
        return self.outcome

    def drafts(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        assert self.drafted is not None, "nothing was drafted before this step"
        return self.drafted


class FakeRunner:
    """Executes steps as described above; `inspect` sees each batch before it is executed.

    An asynchronous one is given steps before the results of those before are known, as a GPU is. Where
    `short_rope_len` is not 0, each context is either all of the short form's rows or all of the long form's. Where it
    is `batch_invariant`, it notices every token computed in the wrong kind of row: of several tokens before the last of
    the prompt, of one from there on, or of tokens with their drafts in a step that has nothing else.
    """

    full_sizes: tuple[int, ...] = ()
    num_awaited_graphs = 0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        asynchronous: bool = False,
        short_rope_len: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        self.block_size = block_size
        self.short_rope_len = short_rope_len
        self.asynchronous = asynchronous
        self.batch_invariant = batch_invariant
        self._tables: dict[int, dict[int, int]] = defaultdict(dict)
        self.inspect: Callable[[StepBatch], None] = lambda batch: None
        self.say: Callable[[np.ndarray[Any, Any]], int] = next_token
        self.last_batch: StepBatch | None = None
        self._token_ids = np.full(num_blocks * block_size, POISON, np.int32)
        self._positions = np.full(num_blocks * block_size, POISON, np.int32)
        self._in_long_rows = np.zeros(num_blocks * block_size, bool)
        self._slots: dict[int, tuple[SlotInit, list[int]]] = {}
        self.drafts = FakeDrafts(num_blocks, block_size)
        self.num_slots = 0  # where drafts are made

    def lose_memory(self) -> None:
        """All that is in the KV cache is gone."""
        self.drafts.lose_memory()
        self._token_ids[:] = POISON
        self._positions[:] = POISON

    @property
    def planes(self) -> list[np.ndarray[Any, Any]]:
        """What is kept of each block [num_blocks, block_size], for copies."""
        return [each.reshape(-1, self.block_size) for each in (self._token_ids, self._positions, self._in_long_rows)]

    def poison(self, blocks: Iterable[int]) -> None:
        """Make it fatal to read these blocks again without storing to them first."""
        blocks = list(blocks)
        self.drafts.poison(blocks)
        self._token_ids.reshape(-1, self.block_size)[list(blocks)] = POISON
        self._positions.reshape(-1, self.block_size)[list(blocks)] = POISON

    def start(self, batch: StepBatch) -> Done:
        outcome = self.execute(batch)
        return Done(outcome, self.drafts.as_array(self.num_slots) if batch.drafting else None)

    def sample(self, running: Done, mask: TokenMask | None) -> None:
        raise AssertionError("the fake knows no constraints")

    def execute(self, batch: StepBatch) -> StepResult:
        check_batch(batch, self.short_rope_len, batch_invariant=self.batch_invariant)
        if batch.table_updates is not None:
            updates = batch.table_updates
            places = list(zip(updates.rows.tolist(), updates.columns.tolist(), strict=True))
            assert len(set(places)) == len(places), "a place of a block table is written twice"
            for (row, column), block in zip(places, updates.blocks.tolist(), strict=True):
                self._tables[row][column] = block
        assert not batch.drafting or batch.drafting[0].table_updates is batch.table_updates
        for number, step in enumerate(batch.drafting):
            check_batch(step, self.short_rope_len, of_draft=True)
            self.drafts.execute(number, step, self._tables, lambda slot: self._slots[slot][1], self.say)
        self.inspect(batch)
        self.last_batch = batch
        for init in batch.slot_inits:
            self._slots[init.slot] = (init, [*init.prompt_token_ids, *init.output_token_ids])
        newest = [self._resolve(token_id) if token_id < 0 else token_id for token_id in batch.input_ids.tolist()]
        stored = batch.slot_mapping >= 0
        slots = batch.slot_mapping[stored]
        assert (self._token_ids[self._slots_of_repeated(batch)] == np.array(newest)[~stored]).all()
        counts = np.diff(batch.cu_seqlens_q)
        self._token_ids[slots] = np.array(newest)[stored]
        self._positions[slots] = batch.positions[stored]
        self._in_long_rows[slots] = np.repeat((counts > 1) & (not batch.verifies), counts)[stored]
        contexts = [self._read_context(batch, row) for row in range(batch.num_seqs)]
        sampled_rows = np.searchsorted(batch.cu_seqlens_q, batch.logits_indices, side="right") - 1
        behind = batch.cu_seqlens_q[sampled_rows + 1] - 1 - batch.logits_indices  # tokens of the row that come later
        token_ids = [
            self._sample(batch, index, contexts[row][: len(contexts[row]) - behind[index]])
            for index, row in enumerate(sampled_rows)
        ]
        logprobs = None
        num_logprobs = batch.sampling.rows["num_logprobs"]
        if (num_logprobs >= 0).any():
            logprobs = [
                TokenLogprobs(token_id, -0.5, 1, list(range(num)), [-1.0] * num) if num >= 0 else None
                for token_id, num in zip(token_ids, num_logprobs.tolist(), strict=True)
            ]
        return StepResult(np.array(token_ids, np.int32), logprobs, self._score_prompts(batch, contexts))

    def _resolve(self, token_id: int) -> int:
        """What stands in the place that a negative id names."""
        number, slot = divmod(-1 - token_id, self.num_slots) if self.num_slots else (0, -1 - token_id)
        return self.drafts.token(number - 1, slot) if number else self._slots[slot][1][-1]

    def _slots_of_repeated(self, batch: StepBatch) -> np.ndarray[Any, Any]:
        """Where the tokens have been stored that a batch computes again beside another one."""
        (repeated,) = np.nonzero(batch.slot_mapping < 0)
        assert (np.diff(batch.cu_seqlens_q)[np.searchsorted(batch.cu_seqlens_q, repeated, side="right") - 1] == 2).all()
        rows = np.searchsorted(batch.cu_seqlens_q, repeated, side="right") - 1
        places = batch.context_lens[rows] - 2
        blocks = [
            self._tables[int(table)][int(place) // self.block_size]
            for table, place in zip(batch.table_rows[rows], places, strict=True)
        ]
        return np.array(blocks, np.int64) * self.block_size + places % self.block_size

    def _score_prompts(self, batch: StepBatch, contexts: list[np.ndarray[Any, Any]]) -> list[PromptScores]:
        rows = batch.prompt_rows
        if rows is None:
            return []
        found = []
        for index, token_id, count in zip(rows.token_indices, rows.next_token_ids, rows.num_logprobs, strict=True):
            row = np.searchsorted(batch.cu_seqlens_q, index, side="right") - 1
            length = batch.context_lens[row] - (batch.cu_seqlens_q[row + 1] - 1 - index)
            found.append(PromptScores.of([score(contexts[row][:length], int(token_id), int(count))]))
        return found

    def _read_context(self, batch: StepBatch, row: int) -> np.ndarray[Any, Any]:
        length = batch.context_lens[row]
        table = self._tables[int(batch.table_rows[row])]
        blocks = [table[column] for column in range(-(-int(length) // self.block_size))]
        first_slots = np.array(blocks, np.int64) * self.block_size
        where = (first_slots[:, None] + np.arange(self.block_size)).ravel()[:length]
        assert len(where) == length, "the block table is too short"
        positions = np.arange(length) + batch.positions[batch.cu_seqlens_q[row + 1] - 1] - (length - 1)
        assert np.array_equal(self._positions[where], positions), "the cache holds other positions"
        token_ids: np.ndarray[Any, Any] = self._token_ids[where]
        if self.batch_invariant:
            init, _ = self._slots[int(batch.table_rows[row])]
            place = np.arange(1, length)  # the first sees one key, and needs no order
            assert np.array_equal(self._in_long_rows[where[1:]], place < len(init.prompt_token_ids) - 1)
        return token_ids

    def _sample(self, batch: StepBatch, index: int, context: np.ndarray[Any, Any]) -> int:
        row = batch.sampling.rows[index]
        init, history = self._slots[int(row["slot"])]
        first_round = batch.rounds[0] if batch.rounds else batch.num_sampled
        if index >= first_round and context.tolist() != history:
            return VOID  # behind a draft token that is not what was sampled: nobody may look at it
        assert context.tolist() == history, "the context differs from the slot's sampling state"
        assert row["position"] == len(history)
        assert row["num_prompt_tokens"] == len(init.prompt_token_ids)
        for name, parameter in ROW_PARAMETERS.items():
            assert row[name] == np.dtype(parameter.type).type(getattr(init.params, name)), name
        token_id = self.say(context)
        history.append(token_id)
        return token_id


def check_batch(
    batch: StepBatch, short_rope_len: int = 0, *, batch_invariant: bool = False, of_draft: bool = False
) -> None:
    """Shapes, types and order are what engine/core/step_batch.py promises."""
    num_rows, num_tokens, num_sampled = batch.num_seqs, batch.num_tokens, batch.num_sampled
    lengths = {
        "input_ids": num_tokens,
        "positions": num_tokens,
        "slot_mapping": num_tokens,
        "cu_seqlens_q": num_rows + 1,
        "context_lens": num_rows,
        "table_rows": num_rows,
        "logits_indices": num_sampled,
    }
    for name, length in lengths.items():
        array = getattr(batch, name)
        assert array.shape == (length,), name
        assert array.dtype == np.int32, name
    if batch_invariant:
        together = batch.table_rows[1:] == batch.table_rows[:-1]
        assert len(set(batch.table_rows.tolist())) == num_rows - together.sum(), "a sequence's rows are apart"
        assert (np.diff(batch.context_lens)[together] == np.diff(batch.cu_seqlens_q)[1:][together]).all()
    else:
        assert len(set(batch.table_rows.tolist())) == num_rows, "two rows share a block table"
        assert batch.slot_mapping.min() >= 0
    counts = np.diff(batch.cu_seqlens_q)
    assert num_tokens == batch.cu_seqlens_q[-1]
    assert counts.min() >= 1
    last = batch.cu_seqlens_q[1:] - 1
    first_rows = batch.positions[last] + 1 - batch.context_lens
    assert set(first_rows.tolist()) <= {0, short_rope_len}
    if short_rope_len:
        assert (batch.context_lens[first_rows == 0] <= short_rope_len).all(), "beyond the short form's rows"
    if batch.rounds:
        assert sum(batch.rounds) == num_sampled
        assert list(batch.rounds) == sorted(batch.rounds, reverse=True)
        assert len(set(batch.logits_indices.tolist())) == num_sampled
        for start, stop in pairwise(np.cumsum([0, *batch.rounds]).tolist()):
            assert len(set(batch.sampling.slots[start:stop].tolist())) == stop - start, "a sequence's rows come in turn"
    else:
        assert set(batch.logits_indices.tolist()) <= set(last.tolist())
    stored = batch.slot_mapping[batch.slot_mapping >= 0]
    assert len(np.unique(stored)) == len(stored) or of_draft, "two tokens are stored in one place"
    assert batch.sampling.rows.shape == (num_sampled,)
    assert batch.sampling.rows.dtype == SAMPLING_ROW


def check_blocks(core: EngineCore) -> None:
    """free + cached + owned = total, no block in two places, references counted, salts kept apart."""
    blocks, scheduler = core.block_manager, core.scheduler
    free, cached = set(blocks.free_blocks), set(blocks.cached_blocks)
    seated = [*scheduler.running, *scheduler.loading]
    tables = [*(sequence.block_table for sequence in seated), *blocks.leaving]
    references = Counter(block for table in tables for block in table)
    owned = set(references)
    assert len(blocks.free_blocks) == len(free)
    assert len(free) + len(cached) + len(owned) == blocks.num_blocks
    assert free | cached | owned == set(range(blocks.num_blocks))
    assert [references[block] for block in range(blocks.num_blocks)] == blocks.reference_counts
    stats = core.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks, stats.num_used_blocks) == (
        len(free),
        len(cached),
        len(owned),
    )
    assert all(blocks.is_published(block) for block in cached)
    assert not any(blocks.is_published(block) for block in free)
    assert not any(sequence.block_table or sequence.num_computed_tokens for sequence in scheduler.waiting)
    salts: dict[int, bytes] = {}
    for sequence in seated:
        for block in sequence.block_table:
            assert salts.setdefault(block, sequence.prefix_salt) == sequence.prefix_salt


def fake_limits(method: str, num_tokens: int | None, max_model_len: int, short_rope_len: int = 0) -> DraftLimits:
    """As the drafters of these methods have them."""
    if method not in STATE_METHODS:
        return DraftLimits(max_model_len, short_rope_len)
    caught_up = 1 + (num_tokens or DRAFT_TOKENS_OF[method])
    return DraftLimits(max_model_len, short_rope_len, shift=1, caught_up=caught_up, rereads=True)


class Harness:
    """An EngineCore over a FakeRunner and a clock of its own, checked after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_queue_len: int = 1000,
        max_model_len: int = 256,
        prefix_caching: bool = True,
        eos_token_ids: Iterable[int] = (EOS,),
        asynchronous: bool = False,
        short_rope_len: int = 0,
        batch_invariant: bool = False,
        make_tiers: Callable[[FakeRunner], KVTiers] | None = None,
        **settings: Any,
    ) -> None:
        """`make_tiers` makes the tiers of a runner; `settings` are further ones of the engine, and `draft_len` the
        context of a draft model."""
        self.now = 100.0
        self.runner = FakeRunner(
            num_blocks,
            block_size,
            asynchronous=asynchronous,
            short_rope_len=short_rope_len,
            batch_invariant=batch_invariant,
        )
        self.runner.inspect = self._check_writes
        limits = None
        if settings.get("speculative_method") in MODEL_METHODS:
            self.runner.num_slots = max_num_seqs
            method, longest = settings["speculative_method"], settings.pop("draft_len", max_model_len)
            limits = fake_limits(method, settings.get("num_speculative_tokens"), longest, short_rope_len)
            self.runner.drafts.shift, self.runner.drafts.rereads = limits.shift, limits.rereads
            settings["speculative_model"] = "fake" if method in FOLDER_METHODS else None
        self.tiers = make_tiers(self.runner) if make_tiers is not None else None
        self.core = EngineCore(
            EngineConfig(
                model="fake",
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_queue_len=max_queue_len,
                block_size=cast(Any, block_size),  # smaller than a model may have
                prefix_caching=prefix_caching,
                batch_invariant=batch_invariant,
                **settings,
            ),
            self.runner,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            num_kv_blocks=num_blocks,
            eos_token_ids=eos_token_ids,
            short_rope_len=short_rope_len,
            clock=lambda: self.now,
            tiers=self.tiers,
            draft_limits=limits,
        )
        self._idle_steps = 0
        self.token_ids: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.last_outputs: dict[str, RequestOutput] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 16,
        *,
        client: bytes = CLIENT,
        priority: int = 0,
        cache_salt: str = "",
        account: AccountRef = NO_ACCOUNT,
        siblings: Sequence[Sibling] = (),
        **params: Any,
    ) -> None:
        sampling_params = SamplingParams(max_tokens=max_tokens, **params)
        request = AddRequest(
            request_id,
            cast(TokenIds, prompt),  # a list too, with ids that no array of the engine could hold
            sampling_params,
            self.now,
            priority,
            cache_salt,
            account=account,
            siblings=list(siblings),
        )
        self.core.add_request(request, client)
        self.token_ids |= {each: [] for each in request.request_ids}

    def step(self, seconds: float = 0.01) -> dict[bytes, list[RequestOutput]]:
        """One step, taking `seconds`; work must bring progress, and every block must be accounted for."""
        had_work, num_steps = self.core.has_work, self.core.num_steps
        is_resetting = self.core.block_manager.is_resetting
        self.now += seconds
        outputs = self.core.step()
        if is_resetting or (self.tiers is not None and self.core.scheduler.loading):
            self._idle_steps = 0  # it goes on with a reset, or may wait for copies
        elif self.runner.asynchronous:
            self._idle_steps = 0 if self.core.num_steps > num_steps or not had_work else self._idle_steps + 1
            assert self._idle_steps <= 1, "a step without progress that was not the first of a row"
        else:
            assert self.core.num_steps == num_steps + had_work, "a step without progress"
        for client_outputs in outputs.values():
            for output in client_outputs:
                assert output.request_id not in self.finish_reasons, "an output after the last"
                self.token_ids[output.request_id] += output.token_ids
                self.last_outputs[output.request_id] = output
                if output.prompt_logprobs is not None:
                    assert output.request_id not in self.prompt_logprobs, "a prompt's logprobs come once"
                    self.prompt_logprobs[output.request_id] = rows_of(output.prompt_logprobs)
                if output.finish_reason is not None:
                    self.finish_reasons[output.request_id] = output.finish_reason
        self.check_blocks()
        copied = self.tiers.copied_blocks if self.tiers is not None else frozenset()
        self.runner.poison(set(self.core.block_manager.free_blocks) - copied)
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        """Step until there is no work."""
        num_steps = 0
        while self.core.has_work:
            assert num_steps < max_steps, "still not done"
            self.step()
            num_steps += 1

    def check_blocks(self) -> None:
        check_blocks(self.core)
        if self.tiers is not None:
            check_tiers(self.tiers, self.core.block_manager.published)

    def _check_writes(self, batch: StepBatch) -> None:
        """A step stores only to blocks that one sequence owns and no other can find; it is as large as it may be."""
        blocks, scheduler = self.core.block_manager, self.core.scheduler
        num_repeated = (batch.slot_mapping < 0).sum()
        assert batch.num_tokens - num_repeated <= scheduler.max_num_batched_tokens
        assert num_repeated <= scheduler.max_num_seqs
        rows_of_sequence = BATCH_INVARIANT_ROWS if self.runner.batch_invariant else 1
        num_drafts = batch.num_sampled - batch.rounds[0] if batch.rounds else 0
        assert num_drafts <= scheduler._max_drafts
        assert batch.num_seqs <= rows_of_sequence * scheduler.max_num_seqs + num_drafts
        for block in set((batch.slot_mapping[batch.slot_mapping >= 0] // blocks.block_size).tolist()):
            assert blocks.reference_counts[block] == 1
            assert not blocks.is_published(block)
