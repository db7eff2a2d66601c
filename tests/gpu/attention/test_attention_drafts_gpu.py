"""Attention of tokens with their drafts on CUDA: to the last bit what each token sees in a row of its own.

The cases called "small" also run on the CPU: see docs/kernels/testing.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import decode, drafts
from tessera.engine.ops.cuda.attention.division import IN_ORDER_SPLITS
from tessera.engine.ops.interface import AttentionMetadata, Ops
from tessera.engine.tensor import Tensor, bfloat16, float16, float32, from_numpy, uint8
from tests.gpu.conftest import NoTransfers
from tests.support.cases.op_cases import AttentionCase, AttentionInputs, poisoned, random_array
from tests.support.references.reference import assert_close, bits

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu

# (queries, context length): splits of 128 keys that end among the queries, before and behind them; rows of one query.
ROWS = ((8, 131), (1, 40), (3, 128), (5, 5), (1, 0), (8, 300), (2, 259))
LONG = ((8, 4100), (8, 384), (1, 2049), (5, 2050), (8, 8192), (2, 700), (8, 5003), (1, 1), (4, 4097))
CASES = [
    AttentionCase("small", ROWS, num_heads=8, num_kv_heads=2, head_dim=64, padding=3),
    AttentionCase("small_128", ROWS[:4], num_heads=8, num_kv_heads=2, head_dim=128),
    AttentionCase("small_256", ROWS[:4], num_heads=4, num_kv_heads=2, head_dim=256),
    AttentionCase("small_80", ROWS[2:], num_heads=3, num_kv_heads=3, head_dim=80),
    AttentionCase("small_window", ((12, 300), (7, 90), (9, 60)), num_heads=6, head_dim=64, sliding_window=77),
    AttentionCase("small_group_5", ROWS[1:5], num_heads=10, num_kv_heads=2, head_dim=64),
    AttentionCase("small_group_12", ROWS[1:4], num_heads=12, num_kv_heads=1, head_dim=64),
    AttentionCase("small_one_of_16", ((16, 150),), num_heads=4, num_kv_heads=1, head_dim=64, block_size=8),
    AttentionCase("small_general", ROWS[1:5], head_dim=72),
    AttentionCase("small_soft_cap", ROWS[:3], num_heads=8, head_dim=128, soft_cap=1.5),
    AttentionCase("small_sinks", ROWS[:3], num_heads=8, head_dim=64),
    AttentionCase("small_sinks_window", ((9, 200), (4, 70)), num_heads=8, head_dim=64, sliding_window=50),
    AttentionCase("small_many_queries", ((40, 170), (65, 65)), num_heads=4, num_kv_heads=2, head_dim=64),
    AttentionCase("only_padding", ((1, 0), (1, 0)), head_dim=64, padding=4),
    AttentionCase("without_queries", ((0, 30), (3, 90), (0, 0), (2, 0), (4, 20)), head_dim=64, padding=2),
    AttentionCase("8B", LONG, num_heads=32, num_kv_heads=8, head_dim=128, padding=5),
    AttentionCase("8B_one_stream", ((8, 384),), num_heads=32, num_kv_heads=8, head_dim=128),
    AttentionCase("8B_16_streams", ((8, 384), (3, 500)) * 8, num_heads=32, num_kv_heads=8, head_dim=128),
    AttentionCase("0.6B", LONG, num_heads=16, num_kv_heads=8, head_dim=128),
    AttentionCase("group_7", LONG, num_heads=14, num_kv_heads=2, head_dim=64),
    AttentionCase("group_1", LONG, num_heads=8, num_kv_heads=8, head_dim=96),
    AttentionCase("group_32", LONG, num_heads=32, num_kv_heads=1, head_dim=64),
    AttentionCase("window", LONG, num_heads=16, num_kv_heads=4, head_dim=128, sliding_window=1000),
    AttentionCase("window_long", ((16, 9000), (9, 4105)), num_heads=8, head_dim=64, sliding_window=4096),
    AttentionCase("256", LONG, num_heads=8, num_kv_heads=2, head_dim=256, sliding_window=600),
    AttentionCase("soft_cap", LONG, num_heads=8, num_kv_heads=4, head_dim=256, soft_cap=0.7),
    AttentionCase("sinks", LONG, num_heads=64, num_kv_heads=8, head_dim=64, sliding_window=128),
]
EVERY_CASE = [
    replace(case, name=f"{case.name}_{dtype}", dtype=dtype)
    for number, case in enumerate(CASES)
    for dtype in ((bfloat16, float16)[number % 2 :: 2] if case.name.startswith("small") else (bfloat16, float16))
]
cases = pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)


class Drafts:
    """A case's tokens, as rows with drafts or as a row each, over the same caches."""

    def __init__(self, case: AttentionCase, cached: np.dtype[Any] | None = None) -> None:
        self.case = case
        self.inputs = AttentionInputs(case)
        self.sinks = random_array(8, (case.num_heads,), case.dtype, 2.0) if "sinks" in case.name else None
        self.keys, self.values = self.inputs.key_cache, self.inputs.value_cache
        if cached is not None:
            rng = np.random.default_rng(5)
            self.keys, self.values = (
                (rng.integers(0, 0x60, cache.shape) | rng.integers(0, 2, cache.shape) << 7).astype(cached)
                for cache in (self.keys, self.values)
            )

    def metadata(self, ops: Ops) -> AttentionMetadata:
        return replace(self.inputs.metadata(ops.device), verifies=True)

    def of_rows(self, ops: Ops) -> AttentionMetadata:
        """Each query a row, and the padding none."""
        whole = self.inputs.metadata(ops.device)
        counts = np.diff(self.inputs.cu_seqlens_q)
        rows = np.repeat(np.arange(len(counts)), counts)
        behind = np.concatenate([np.arange(count)[::-1] for count in counts]) if len(counts) else rows
        lengths = np.maximum(self.inputs.context_lens[rows] - behind, 0)
        return replace(
            whole,
            table_rows=from_numpy(whole.table_rows.numpy()[rows], ops.device),
            cu_seqlens_q=from_numpy(np.arange(len(rows) + 1, dtype=np.int32), ops.device),
            context_lens=from_numpy(lengths.astype(np.int32), ops.device),
            max_seqlen_q=1,
        )

    def attend(self, ops: Ops, metadata: AttentionMetadata, out: Tensor | None = None) -> Array:
        case, device = self.case, ops.device
        keys, values = (from_numpy(cache.copy(), device) for cache in (self.keys, self.values))
        return ops.paged_attention(
            from_numpy(self.inputs.q, device),
            keys,
            values,
            metadata,
            scale=case.scale,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            sinks=None if self.sinks is None else from_numpy(self.sinks, device),
            out=out,
        ).numpy()


def check_bits(step: Drafts, ops: CudaOps) -> Array:
    found = step.attend(ops, step.metadata(ops), poisoned(step.inputs.q.shape, step.case.dtype, ops.device))
    expected = step.attend(ops, step.of_rows(ops))
    np.testing.assert_array_equal(bits(found), bits(expected))
    return found


def make_ops(device: CudaDevice) -> CudaOps:
    """In order, since otherwise the number of rows decides how a row's keys are divided."""
    ops = CudaOps(device, batch_invariant=True)
    ops.attention_memory.reserve_decodes(160, 64, 256, IN_ORDER_SPLITS)
    return ops


@cases
def test_each_query_has_the_bits_of_a_row_of_its_own(
    case: AttentionCase, cuda_device: CudaDevice, cpu_ops: CpuOps
) -> None:
    step, ops = Drafts(case), make_ops(cuda_device)
    found = check_bits(step, ops)
    assert_close(found, step.attend(cpu_ops, step.metadata(cpu_ops)), case.dtype)
    arrivals = ops.attention_memory.arrivals
    assert arrivals is not None
    assert not arrivals.numpy().any(), "the next launch finds counters that are not 0"


@pytest.mark.parametrize("max_splits", [1, 2])
@pytest.mark.parametrize("window", [None, 290])
def test_queries_whose_keys_are_divided_in_different_ways(
    max_splits: int, window: int | None, cuda_device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small: with so few splits their size grows where a few hundred keys do."""
    for module in (decode, drafts):
        monkeypatch.setattr(module, "IN_ORDER_SPLITS", max_splits)
    rows = [(9, 128 * max_splits * part + offset) for part in (1, 2) for offset in (1, 4, 9)]
    case = AttentionCase("", (*rows, (16, 330)), head_dim=64, dtype=bfloat16, sliding_window=window)
    check_bits(Drafts(case), make_ops(cuda_device))


@pytest.mark.parametrize("row_tiles", [1, 2])
@pytest.mark.parametrize("most_parts", [1, 2, 40])
def test_neither_tiles_nor_blocks_change_a_bit(
    row_tiles: int, most_parts: int, cuda_device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small: one tile or two for a block, and one block or several for a row's keys."""
    monkeypatch.setattr(drafts, "FEW_BLOCKS", 0 if row_tiles == 2 else 1 << 20)
    monkeypatch.setattr(drafts, "FULL_BLOCKS", most_parts)
    drafts.plan_drafts.cache_clear()
    try:
        case = AttentionCase("", ((8, 400), (3, 130), (1, 77)), num_heads=8, num_kv_heads=2, head_dim=64)
        step = Drafts(replace(case, dtype=bfloat16, padding=2))
        check_bits(step, make_ops(cuda_device))
    finally:
        drafts.plan_drafts.cache_clear()


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("small", ROWS[:4], num_heads=8, head_dim=64, dtype=bfloat16),
        AttentionCase("small_128", ROWS[2:4], num_heads=8, head_dim=128, dtype=float16, block_size=8),
        AttentionCase("8B", LONG, num_heads=32, num_kv_heads=8, head_dim=128, dtype=bfloat16),
        AttentionCase("256", LONG[:4], num_heads=8, num_kv_heads=4, head_dim=256, dtype=bfloat16),
    ],
    ids=lambda case: case.name,
)
def test_a_cache_of_e4m3(case: AttentionCase, cuda_device: CudaDevice, cpu_ops: CpuOps) -> None:
    step = Drafts(case, uint8)
    found = check_bits(step, make_ops(cuda_device))
    assert_close(found, step.attend(cpu_ops, step.metadata(cpu_ops)), case.dtype)


def test_small_drafts_in_float32(cuda_ops: CudaOps, cpu_ops: CpuOps, no_transfers: NoTransfers) -> None:
    step = Drafts(AttentionCase("", ROWS[:4], head_dim=64, dtype=float32))
    metadata = step.metadata(cuda_ops)
    assert_close(step.attend(cuda_ops, metadata), step.attend(cpu_ops, step.metadata(cpu_ops)), float32)
