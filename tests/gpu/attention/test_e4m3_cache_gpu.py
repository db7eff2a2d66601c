"""A KV cache of e4m3 on a CUDA device against NumPy, and NumPy against float64 of the numbers that the cache holds.

Slots without a token hold the code of NaN. Where a kernel rounds queries to e4m3, too, it is compared with float64 of
those. The cases called "small" also run on the CPU (`tests/emulation`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.engine.formats.fp8 import E4M3_VALUES, codes_of
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import sm90_prefill, widen
from tessera.engine.ops.cuda.attention.decode import DECODE_SHAPES
from tessera.engine.ops.cuda.types import HALF_BYTES
from tessera.engine.ops.interface import HeadTransform, Ops
from tessera.engine.tensor import Tensor, bfloat16, float16, float32, from_numpy
from tests.gpu.attention.rows import GROWING_ROWS, grow
from tests.gpu.conftest import NoTransfers
from tests.support.cases.op_cases import (
    DECODE_ROWS,
    AttentionCase,
    AttentionInputs,
    poisoned,
    random_angles,
    random_array,
)
from tests.support.references import reference
from tests.support.references.reference import assert_close
from tests.support.references.rounded_queries import rounded_queries

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.gpu

MIXED = ((1, 70), (5, 40), (1, 0), (3, 3), (1, 17), (1, 129))
LONG = ((1, 5000), (1, 4097), (64, 5000), (1, 255), (200, 3000))
CASES = [
    AttentionCase("small", MIXED, num_heads=8, head_dim=64, dtype=bfloat16, padding=2),
    AttentionCase("small_128", MIXED, num_heads=8, head_dim=128, dtype=bfloat16, sliding_window=30),
    AttentionCase("small_float16", MIXED, num_heads=6, head_dim=128, dtype=float16, block_size=8),
    AttentionCase("small_96", MIXED, head_dim=96, dtype=bfloat16),
    AttentionCase("small_split", ((20, 1100), (2, 300)), num_heads=4, head_dim=128, dtype=bfloat16),
    AttentionCase("small_256", MIXED[:3], head_dim=256, dtype=bfloat16),
    AttentionCase("small_80", MIXED, head_dim=80, dtype=bfloat16),
    AttentionCase("small_general", MIXED, head_dim=72, dtype=bfloat16),
    AttentionCase("small_float32", MIXED, head_dim=20, dtype=float32),
    AttentionCase("small_cap_128", MIXED[:3], num_heads=8, head_dim=128, soft_cap=1.5, dtype=bfloat16),
    AttentionCase("small_cap_general", MIXED[:3], head_dim=64, soft_cap=1.5, dtype=bfloat16),
    AttentionCase("small_sinks_64", MIXED, num_heads=8, head_dim=64, sliding_window=30, dtype=bfloat16),
    AttentionCase("small_sinks_general", MIXED[:3], head_dim=72, dtype=bfloat16),
    AttentionCase("long", LONG, num_heads=8, head_dim=64, dtype=bfloat16),
    AttentionCase("long_128", LONG, num_heads=8, head_dim=128, block_size=64, dtype=bfloat16, sliding_window=1000),
    AttentionCase("decodes", DECODE_ROWS, num_heads=32, num_kv_heads=8, head_dim=128, dtype=bfloat16),
    AttentionCase("many_decodes", DECODE_ROWS * 5, num_heads=16, num_kv_heads=8, head_dim=128, dtype=float16),
    AttentionCase("one_decode", ((1, 1900),), num_heads=32, num_kv_heads=8, head_dim=128, dtype=bfloat16),
    AttentionCase("cap_256", DECODE_ROWS, num_heads=8, num_kv_heads=4, head_dim=256, soft_cap=0.7, dtype=bfloat16),
    AttentionCase("sinks_one_decode", ((1, 1900),), num_heads=32, num_kv_heads=8, head_dim=64, dtype=bfloat16),
]
DECODES = next(case for case in CASES if case.name == "decodes")
SMALL = [case for case in CASES if case.name.startswith("small")]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
scaled = pytest.mark.parametrize("scaled", [False, True], ids=["ones", "scales"])


def scales_of(case: AttentionCase, scaled: bool) -> Array | None:
    if not scaled:
        return None
    return np.random.default_rng(3).uniform(0.01, 0.1, (2, case.num_kv_heads)).astype(np.float32)


def codes(cache: Array, scales: Array) -> Array:
    """[blocks, Hkv, block_size, D] divided by the heads' scales [Hkv]."""
    divided = cache.astype(np.float32) / scales[:, None, None]
    return codes_of(divided.astype(np.float32))


class Inputs:
    """A case whose caches are e4m3."""

    def __init__(self, case: AttentionCase, scaled: bool, plain: AttentionInputs | None = None) -> None:
        self.plain = plain or AttentionInputs(case)
        self.case = case
        self.scales = scales_of(case, scaled)
        self.sinks = random_array(8, (case.num_heads,), case.dtype, 2.0) if "sinks" in case.name else None
        ones = np.ones((2, case.num_kv_heads), np.float32) if self.scales is None else self.scales
        self.keys, self.values = (
            codes(cache, ones[kind]) for kind, cache in enumerate((self.plain.key_cache, self.plain.value_cache))
        )
        self.key_numbers = E4M3_VALUES[self.keys].astype(np.float64) * ones[0][:, None, None]
        self.value_numbers = E4M3_VALUES[self.values].astype(np.float64) * ones[1][:, None, None]

    def on(self, ops: Ops) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        caches = from_numpy(self.keys.copy(), ops.device), from_numpy(self.values.copy(), ops.device)
        return caches, None if self.scales is None else from_numpy(self.scales, ops.device)

    def exactly(self, q: Array) -> Array:
        """Attention over the numbers in the cache, in float64."""
        plain, case = self.plain, self.case
        return reference.paged_attention(
            q,
            self.key_numbers,
            self.value_numbers,
            plain.block_tables,
            plain.cu_seqlens_q,
            plain.context_lens,
            case.scale,
            case.sliding_window,
            case.soft_cap,
            self.sinks,
        )

    def settings(self, ops: Ops) -> dict[str, Any]:
        case, sinks = self.case, None if self.sinks is None else from_numpy(self.sinks, ops.device)
        return {
            "scale": case.scale,
            "sliding_window": case.sliding_window,
            "soft_cap": case.soft_cap,
            "sinks": sinks,
        }


def attend(ops: Ops, inputs: Inputs, out: Tensor | None = None) -> Array:
    caches, scales = inputs.on(ops)
    q, metadata = from_numpy(inputs.plain.q, ops.device), inputs.plain.metadata(ops.device)
    return ops.paged_attention(q, *caches, metadata, **inputs.settings(ops), kv_scales=scales, out=out).numpy()


def rounds_queries(case: AttentionCase, ops: CudaOps) -> bool:
    """Whether those of rows with several meet the codes of keys."""
    if case.dtype == float32 or not sm90_prefill.runs(ops.device, case.head_dim, case.block_size):
        return False
    shape = sm90_prefill.SHAPES[case.head_dim]
    return shape.by_codes(e4m3=True, in_order=False, capped=case.soft_cap is not None)


def queries_met(case: AttentionCase, q: Array) -> Array:
    """q [T, Hq * D], rounded but for rows with one query, float64."""
    single = np.concatenate([np.full(queries, queries == 1) for queries, _ in case.rows])
    padded = np.pad(single, (0, len(q) - len(single)))
    return np.where(padded[:, None], q.astype(np.float64), rounded_queries(q, case.num_heads))


def check(inputs: Inputs, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    case = inputs.case
    out = poisoned(inputs.plain.q.shape, case.dtype, cuda_ops.device)
    found = attend(cuda_ops, inputs, out)
    if rounds_queries(case, cuda_ops):
        expected = inputs.exactly(queries_met(case, inputs.plain.q)).astype(case.dtype)
    else:
        expected = attend(cpu_ops, inputs)
    assert_close(found, expected, case.dtype)


@cases
@scaled
def test_attention(case: AttentionCase, scaled: bool, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    check(Inputs(case, scaled), cuda_ops, cpu_ops)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_grow_small(head_dim: int, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    case = AttentionCase("", GROWING_ROWS, num_heads=8, head_dim=head_dim, dtype=bfloat16)
    plain = AttentionInputs(case)
    grow(plain)
    check(Inputs(case, scaled=False, plain=plain), cuda_ops, cpu_ops)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_numpy_attends_to_what_the_small_cache_holds(case: AttentionCase, cpu_ops: CpuOps) -> None:
    case = replace(case, dtype=float32)
    inputs = Inputs(case, scaled=True)
    assert_close(attend(cpu_ops, inputs), inputs.exactly(inputs.plain.q), float32)


@pytest.mark.parametrize("case", [*SMALL, DECODES], ids=lambda case: case.name)
@scaled
def test_keys_and_values_are_stored_as_numpy_does(
    case: AttentionCase, scaled: bool, cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    """Bit for bit without a rotation, by which a rounding may differ; what has no place in the step stays."""
    inputs = Inputs(case, scaled)
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = random_array(15, (len(inputs.plain.q), width), case.dtype)
    results = []
    for ops in (cuda_ops, cpu_ops):
        caches, scales = inputs.on(ops)
        metadata = inputs.plain.metadata(ops.device)
        heads: dict[str, Any] = {"num_heads": case.num_heads, "kv_scales": scales}
        queries = ops.rope_and_store(from_numpy(qkv, ops.device), *caches, metadata, HeadTransform(), **heads)
        results.append([tensor.numpy() for tensor in (queries, *caches)])
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


STEPS = [case for case in CASES if case.head_dim in DECODE_SHAPES and case.dtype != float32]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
@scaled
def test_a_decode_step(case: AttentionCase, scaled: bool, cuda_ops: CudaOps, no_transfers: NoTransfers) -> None:
    """The kernel that stores and attends is bit for bit the two, with the newest key as the cache holds it."""
    rows = tuple((1, context) for _, context in case.rows)
    case = replace(case, rows=rows, padding=0)
    inputs, device = Inputs(case, scaled), cuda_ops.device
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_dim
    qkv = from_numpy(random_array(15, (len(rows), width), case.dtype), device)
    angles = random_angles(int(inputs.plain.context_lens.max()) + 1, case.head_dim)
    norm = from_numpy(random_array(16, (case.head_dim,), case.dtype), device)
    transform = HeadTransform(from_numpy(angles, device), norm, norm)
    metadata = inputs.plain.metadata(device)
    around = inputs.settings(cuda_ops)
    queries, out = (poisoned(inputs.plain.q.shape, case.dtype, device) for _ in range(2))

    caches, scales = inputs.on(cuda_ops)
    heads: dict[str, Any] = {"num_heads": case.num_heads, "kv_scales": scales}
    with no_transfers():
        keys, values = caches
        cuda_ops.attention(qkv, keys, values, metadata, transform, queries=queries, out=out, **around, **heads)
    apart, _ = inputs.on(cuda_ops)
    queries = cuda_ops.rope_and_store(qkv, *apart, metadata, transform, **heads)
    expected = cuda_ops.paged_attention(queries, *apart, metadata, kv_scales=scales, **around)
    for actual, other in zip(caches, apart, strict=True):
        np.testing.assert_array_equal(actual.numpy(), other.numpy())
    assert_close(out.numpy(), expected.numpy(), case.dtype)


WIDENED = [
    AttentionCase("small_64", ((20, 300), (1, 70), (40, 200), (3, 290), (30, 150)), head_dim=64, dtype=bfloat16),
    AttentionCase("small_128", ((70, 400), (33, 33), (35, 129)), num_heads=8, head_dim=128, dtype=float16),
    AttentionCase("small_window", ((20, 600), (1, 500)), head_dim=128, block_size=8, sliding_window=90, dtype=bfloat16),
    AttentionCase("prompt", ((2048, 2048), (1, 70)), 32, 8, 128, dtype=bfloat16),
    AttentionCase("chunks", ((600, 5000), (1, 70), (300, 2000), (5, 4000), (400, 1500)), 32, 8, 128, dtype=bfloat16),
    AttentionCase("window", ((600, 5000), (300, 2000)), 32, 8, 128, sliding_window=1000, dtype=bfloat16),
]


@pytest.mark.parametrize("case", WIDENED, ids=lambda case: case.name)
@pytest.mark.parametrize("room", ["all", "some"])
@scaled
def test_rows_widened_ahead_have_the_same_bits(
    case: AttentionCase, room: str, scaled: bool, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all rows with queries and keys enough have room, the first ones, or none."""
    if not widen.WIDEN_CACHE.supports(cuda_ops.device.arch):
        pytest.skip("its prompts are not widened ahead")
    if case.name.startswith("small"):
        monkeypatch.setattr(widen, "MIN_STEP_TOKENS", 2)
        monkeypatch.setattr(widen, "MIN_QUERY_ROWS", 10 * case.num_heads // case.num_kv_heads)
        monkeypatch.setattr(widen, "MIN_KEYS", 100)
    inputs = Inputs(case, scaled)
    kinds = 1 if rounds_queries(case, cuda_ops) else 2  # values alone, or keys too
    tile_bytes = kinds * HALF_BYTES * case.num_kv_heads * widen.TILE_KEYS * case.head_dim
    tiles = [-(-context // widen.TILE_KEYS) for _, context in case.rows]
    fitting = sum(tiles) if room == "all" else tiles[0]
    monkeypatch.setattr(widen, "WIDENED_BYTES", fitting * tile_bytes)
    results = []
    for _ in range(2):
        ops = CudaOps(cuda_ops.device)
        results.append(attend(ops, inputs, poisoned(inputs.plain.q.shape, case.dtype, ops.device)))
        if len(results) == 1:
            memory = widen.widened_cache_of(ops.attention_memory)
            assert memory is not None
            firsts = memory.first_tiles[: len(case.rows)].numpy()
            assert firsts[0] == 0
            assert room == "all" or (firsts[1:] < 0).all()
        monkeypatch.setattr(widen, "MIN_STEP_TOKENS", 1 << 30)
    ahead, in_turn = results
    np.testing.assert_array_equal(ahead, in_turn)
