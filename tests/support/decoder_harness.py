"""Drives a decoder or a model runner by hand: sequences laid out in scattered KV blocks, steps as lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.collectives.interface import Collectives
from tessera.engine.contract.block_digests import first_row
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.sampling_row import SAMPLING_ROW, row_values
from tessera.engine.core.step_batch import SamplingBatch, SlotInit, StepBatch, TableUpdates
from tessera.engine.formats import AdapterSelection, KVFormat
from tessera.engine.models.buffers import StepBuffers
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.decoder import Decoder
from tessera.engine.models.kv_cache import KVCache
from tessera.engine.models.rope_tables import make_tables
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.interface import AttentionMetadata, Ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.step_inputs import StepShape
from tessera.engine.tensor import from_numpy
from tests.support.cases.token_ids import token_ids

Array = np.ndarray[Any, Any]


def scattered_blocks(count: int, first: int = 0) -> list[int]:
    """`count` block numbers in an order that is neither ascending nor contiguous."""
    order = [*range(1, count, 2), *range(0, count, 2)]
    return [first + block for block in order[::-1]]


def int32(values: Any) -> Array:
    return np.asarray(values, np.int32)


class DecoderHarness:
    """A decoder with a KV cache of two sequences' size; positions are those of sequences of `max_model_len`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        dtype: np.dtype[Any],
        *,
        max_model_len: int,
        block_size: int = 8,
        kv_dtype: np.dtype[Any] | None = None,
        ranks: Collectives | None = None,
        selection: AdapterSelection | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.block_size = block_size
        self.num_blocks = -(-max_model_len // block_size)
        cache = KVCache(config, 2 * self.num_blocks, block_size, KVFormat(kv_dtype or dtype), ops.device)
        rope_tables = make_tables(config.ropes, max_model_len, ops.device)
        self._rope_row = first_row(rope_tables.short_len, max_model_len)
        self.decoder = Decoder(config, weights, ops, cache.layers, rope_tables, ranks=ranks, selection=selection)
        self.buffers = StepBuffers(
            config,
            dtype,
            ops.device,
            max_tokens=max_model_len,
            max_logits=max_model_len,
            shared=ranks is not None,
        )

    @classmethod
    def of(cls, folder: Path, ops: Ops, dtype: np.dtype[Any], *, max_model_len: int, **settings: Any) -> DecoderHarness:
        """The decoder of a model folder."""
        config = load_config(folder)
        weights = load_weights(folder, config, dtype, ops)
        return cls(config, weights, ops, dtype, max_model_len=max_model_len, **settings)

    def logits(self, token_ids: list[int], chunks: list[int] | None = None) -> Array:
        """Logits [T, V] of one sequence computed in steps of `chunks` tokens, by default in one."""
        blocks = scattered_blocks(self.num_blocks, first=self.num_blocks // 2)
        found = []
        start = 0
        for size in chunks or [len(token_ids)]:
            stop = start + size
            inputs = self.step_inputs(token_ids[start:stop], start, blocks)
            found.append(np.array(self.decoder.forward(*inputs, self.buffers).numpy()))
            start = stop
        assert start == len(token_ids), "the chunks cover the sequence"
        return np.concatenate(found)

    def step_inputs(self, token_ids: list[int], start: int, blocks: list[int]) -> tuple[Any, AttentionMetadata, Any]:
        device = self.ops.device
        positions = np.arange(start, start + len(token_ids))
        slots = [
            blocks[position // self.block_size] * self.block_size + position % self.block_size for position in positions
        ]
        metadata = AttentionMetadata(
            positions=from_numpy(int32(positions + self._rope_row), device),
            slot_mapping=from_numpy(int32(slots), device),
            block_tables=from_numpy(int32([blocks]), device),
            table_rows=from_numpy(int32([0]), device),
            cu_seqlens_q=from_numpy(int32([0, len(token_ids)]), device),
            context_lens=from_numpy(int32([start + len(token_ids)]), device),
            max_seqlen_q=len(token_ids),
            max_context_len=start + len(token_ids),
        )
        indices = from_numpy(int32(np.arange(len(token_ids))), device)
        return from_numpy(int32(token_ids), device), metadata, indices


def relative_error(actual: Array, expected: Array) -> float:
    """max |actual - expected| / max |expected|; infinite where `actual` is not finite."""
    if not np.isfinite(actual).all():
        return float("inf")
    return float(np.abs(actual.astype(np.float64) - expected).max() / np.abs(expected).max())


@dataclass
class Row:
    """One sequence as a test keeps it: all tokens known so far, and how many are in the KV cache."""

    slot: int
    blocks: list[int]
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    entered: bool = False
    suppressed: tuple[int, ...] = ()
    rope_row: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def step_batch(rows: list[Row], block_size: int, num_scheduled: list[int] | None = None) -> StepBatch:
    """The batch that advances every row by `num_scheduled` tokens, by default by all it lacks; rows
    that thereby catch up are sampled. Marks the tokens as computed."""
    counts = num_scheduled or [len(row.tokens) - row.num_computed for row in rows]
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = [0]
    sampled: list[Row] = []
    logits_indices: list[int] = []
    inits: list[SlotInit] = []
    new: list[Row] = []
    for row, count in zip(rows, counts, strict=True):
        reach = range(row.num_computed, row.num_computed + count)
        ids += row.tokens[reach.start : reach.stop]
        positions += [row.rope_row + at for at in reach]
        slots += [row.blocks[at // block_size] * block_size + at % block_size for at in reach]
        ends.append(ends[-1] + count)
        row.num_computed += count
        if not row.entered:
            inits.append(SlotInit(row.slot, row.params, token_ids(row.prompt), list(row.output), row.suppressed))
            row.entered = True
            new.append(row)
        if row.num_computed == len(row.tokens):
            sampled.append(row)
            logits_indices.append(ends[-1] - 1)
    return StepBatch(
        input_ids=int32(ids),
        positions=int32(positions),
        slot_mapping=int32(slots),
        table_rows=int32([row.slot for row in rows]),
        cu_seqlens_q=int32(ends),
        context_lens=int32([row.num_computed for row in rows]),
        logits_indices=int32(logits_indices),
        sampling=_sampling_batch(sampled),
        slot_inits=inits,
        table_updates=_table_updates(new),
    )


def as_verification(batch: StepBatch) -> StepBatch:
    """The same step, each of whose rows is a token and its draft."""
    starts, counts = batch.cu_seqlens_q[:-1], np.diff(batch.cu_seqlens_q)
    rounds = [np.flatnonzero(counts > depth) for depth in range(int(counts.max()))]
    rows = np.concatenate(rounds)
    depths = np.repeat(np.arange(len(rounds)), [len(each) for each in rounds])
    sampling = batch.sampling.rows[rows]
    sampling["position"] = (batch.context_lens - counts + 1)[rows] + depths
    return replace(
        batch,
        logits_indices=int32(starts[rows] + depths),
        sampling=SamplingBatch.of(sampling),
        rounds=tuple(len(each) for each in rounds),
    )


def _table_updates(rows: list[Row]) -> TableUpdates:
    """All blocks of these rows."""
    return TableUpdates(
        int32([row.slot for row in rows for _ in row.blocks]),
        int32([column for row in rows for column in range(len(row.blocks))]),
        int32([block for row in rows for block in row.blocks]),
    )


def _sampling_batch(rows: list[Row]) -> SamplingBatch:
    values = [
        row_values(row.params, slot=row.slot, num_prompt_tokens=len(row.prompt), position=len(row.tokens))
        for row in rows
    ]
    return SamplingBatch.of(np.array(values, SAMPLING_ROW))


def logits_with_and_without_the_last_layers_rest(runner: ModelRunner) -> Iterator[tuple[Array, Array]]:
    """Of two steps with chunks of prompts, whole prompts and decodes: logits from a forward that computes every token
    to the end, and from one that leaves out of the last layer what no logits need."""
    block_size, params = runner.block_size, SamplingParams(max_tokens=8, temperature=0.0)
    per_row = -(-64 // block_size)
    rows = [
        Row(
            slot,
            scattered_blocks(per_row, first=slot * per_row),
            [3 + (7 * slot + i) % 90 for i in range(length)],
            params,
        )
        for slot, length in enumerate((20, 45, 12, 33))
    ]
    for counts in ([20, 10, 12, 5], [1, 20, 1, 28]):
        batch = step_batch(rows, block_size, counts)
        inputs = runner._inputs(StepShape.of(batch), max(counts), 64)
        runner._submit(inputs, batch)
        whole = runner._forward(inputs, every_token=True).numpy().copy()
        yield whole, runner._forward(inputs).numpy().copy()
        for row in rows:
            if row.num_computed == len(row.tokens):
                row.output.append(5)
