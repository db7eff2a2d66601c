"""CUDA paged attention against the NumPy implementation.

Slots without a token are NaN on both devices, outputs beforehand too, and the number of host-device
copies must stand still.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import TesseraError
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import sm90_prefill
from tessera.engine.tensor import CPU, bfloat16, float16, float32, from_numpy
from tests.gpu.attention.rows import GROWING_ROWS, assert_splits_are_done, attend, grow, poison_splits
from tests.gpu.conftest import NoTransfers
from tests.support.cases.op_cases import ATTENTION_CASES, DECODE_ROWS, DTYPES, AttentionCase, AttentionInputs, poisoned
from tests.support.references.reference import assert_close, bits

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random_rows(seed: int, count: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Half of them decode rows, the others chunks of a prefill."""
    rng = np.random.default_rng(seed)
    contexts = rng.integers(1, longest, count)
    queries = np.where(rng.random(count) < 0.5, 1, np.minimum(contexts, rng.integers(2, 70, count)))
    return tuple(zip(queries.tolist(), contexts.tolist(), strict=True))


LONG = ((1, 5000), (1, 4097), (64, 5000), (1, 255), (1, 256), (1, 257), (200, 3000))
PROMPTS = ((300, 300), (0, 0), (290, 411), (4, 0), (1, 77), (2, 129), (128, 128), (500, 1700))

LARGE_CASES = [
    AttentionCase("long", LONG, num_heads=8, head_dim=64),
    AttentionCase("long_window", LONG, num_heads=8, head_dim=64, sliding_window=1000),
    AttentionCase("long_128", LONG, num_heads=8, head_dim=128, block_size=64),
    AttentionCase("long_general", LONG, head_dim=72, block_size=32),
    AttentionCase("long_80", LONG, head_dim=80, block_size=32),
    AttentionCase("prompts_80", PROMPTS, num_heads=6, head_dim=80, block_size=24, padding=2),
    AttentionCase("prompts_soft_cap", PROMPTS, num_heads=8, head_dim=128, soft_cap=1.5, padding=3),
    AttentionCase("window_soft_cap", ((37, 37), (1, 20), (20, 290)), head_dim=128, sliding_window=150, soft_cap=1.5),
    AttentionCase("mixed_64_rows", random_rows(2, 64, 700), num_heads=8, head_dim=64, padding=5),
    AttentionCase("mixed_64_rows_128", random_rows(3, 64, 400), num_heads=8, head_dim=128, sliding_window=129),
    AttentionCase("decode_64_rows", DECODE_ROWS, num_heads=16, num_kv_heads=4, head_dim=128),
    AttentionCase("head_dim_256", random_rows(4, 12, 600), head_dim=256),
    AttentionCase("group_32", random_rows(5, 12, 300), num_heads=32, num_kv_heads=1, head_dim=64),
    AttentionCase("prompts_64", PROMPTS, num_heads=6, head_dim=64, block_size=24),
    AttentionCase("prompts_128", PROMPTS, num_heads=8, head_dim=128, block_size=8, padding=3),
    AttentionCase("prompts_128_window", PROMPTS, num_heads=3, num_kv_heads=1, head_dim=128, sliding_window=200),
    AttentionCase("odd_blocks", PROMPTS, head_dim=128, block_size=20),
]
EVERY_CASE = [
    replace(case, name=f"{case.name}_{dtype}", dtype=dtype)
    for case in [*ATTENTION_CASES, *LARGE_CASES]
    for dtype in DTYPES
    if not case.name.startswith("dtype_")
]


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_paged_attention(case: AttentionCase, cuda_ops: CudaOps, cpu_ops: CpuOps, no_transfers: NoTransfers) -> None:
    inputs = AttentionInputs(case)
    expected = attend(cpu_ops, inputs)
    out = poisoned(inputs.q.shape, case.dtype, cuda_ops.device)
    q, metadata = from_numpy(inputs.q, cuda_ops.device), inputs.metadata(cuda_ops.device)
    caches = inputs.caches(cuda_ops.device)
    settings: dict[str, Any] = {"sliding_window": case.sliding_window, "soft_cap": case.soft_cap}
    with no_transfers():
        cuda_ops.paged_attention(q, *caches, metadata, scale=case.scale, **settings, out=out)
    assert_close(out.numpy(), expected, case.dtype)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: case.name)
def test_the_portable_kernel_and_that_of_sm_90a_agree(case: AttentionCase, cuda_ops: CudaOps) -> None:
    if cuda_ops.device.arch != "90a" or case.dtype == float32 or case.head_dim not in sm90_prefill.SHAPES:
        pytest.skip("the same kernel")
    inputs = AttentionInputs(case)
    expected = attend(cuda_ops, inputs)
    portable = CudaOps(cuda_ops.device)
    portable.attention_kernels.restrict(without=["sm90_prefill"])
    assert_close(attend(portable, inputs), expected, case.dtype)


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_grow_small(head_dim: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    inputs = AttentionInputs(AttentionCase("", GROWING_ROWS, num_heads=8, head_dim=head_dim, dtype=dtype))
    grow(inputs)
    assert_close(attend(cuda_ops, inputs), attend(cpu_ops, inputs), dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_tiles_than_blocks_give_the_same_every_time(head_dim: int, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    """Which block takes which tile is not the same every time; the result is."""
    rows = ((70, 70), (400, 900), (33, 33), (200, 200)) * 4
    inputs = AttentionInputs(
        AttentionCase("", rows, num_heads=16, num_kv_heads=16, head_dim=head_dim, dtype=bfloat16, sliding_window=300)
    )
    expected = attend(cuda_ops, inputs)
    for _ in range(3):
        np.testing.assert_array_equal(attend(cuda_ops, inputs), expected)
    assert_close(expected, attend(cpu_ops, inputs), bfloat16)


@pytest.mark.parametrize("sliding_window", [None, 150])
def test_chunks_of_a_prefill_are_bit_for_bit_the_whole(sliding_window: int | None, cuda_ops: CudaOps) -> None:
    case = AttentionCase("", ((500, 500),), head_dim=128, sliding_window=sliding_window, dtype=bfloat16)
    whole = AttentionInputs(case)
    expected = attend(cuda_ops, whole)
    for chunk in (50, 100, 499):
        for start in range(0, 500 - chunk + 1, chunk):
            end = start + chunk
            part = AttentionInputs(replace(case, rows=((end - start, end),)))
            part.key_cache, part.value_cache = whole.key_cache, whole.value_cache
            part.block_tables, part.q = whole.block_tables, whole.q[start:end]
            np.testing.assert_array_equal(attend(cuda_ops, part), expected[start:end])


# Few tiles of queries with many keys, which are split on sm_90a.
SEVERAL = ((100, 5000), (60, 2500), (1, 700), (40, 40), (3, 4000), (12, 0), (0, 0), (130, 1300))
SPLIT_CASES = [
    AttentionCase("one_row", ((100, 5000),), num_heads=16, num_kv_heads=8, head_dim=128),
    AttentionCase("one_row_64", ((100, 5000),), num_heads=16, num_kv_heads=8, head_dim=64),
    AttentionCase("window", ((100, 5000),), num_heads=8, head_dim=128, sliding_window=3000),
    AttentionCase("window_64", ((100, 5000), (2, 4999)), num_heads=8, head_dim=64, sliding_window=3000),
    AttentionCase("several", SEVERAL, num_heads=8, num_kv_heads=4, head_dim=128, padding=3),
    AttentionCase("several_64", SEVERAL, num_heads=8, num_kv_heads=4, head_dim=64, block_size=24),
    AttentionCase("whole_prompt", ((1500, 1500),), num_heads=2, num_kv_heads=1, head_dim=128),
    AttentionCase("whole_prompt_64", ((1500, 1500),), num_heads=2, num_kv_heads=1, head_dim=64),
    AttentionCase("shortest", ((2, 1024),), head_dim=128),
    AttentionCase("most_splits", ((20, 9000),), num_heads=2, num_kv_heads=1, head_dim=128),
    *[
        AttentionCase(f"group_{group}_{head_dim}", ((90, 3000),), num_heads=2 * group, head_dim=head_dim)
        for group in (1, 4, 7)
        for head_dim in (64, 128)
    ],
]


@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.name)
def test_keys_of_few_queries_are_split(
    case: AttentionCase, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    """Which block is the last of a tile is not the same every time; the result is."""
    inputs = AttentionInputs(replace(case, dtype=dtype))
    partials = poison_splits(cuda_ops)
    first = attend(cuda_ops, inputs, poisoned(inputs.q.shape, dtype, cuda_ops.device))
    if partials is not None:
        assert np.isfinite(partials.numpy()).any(), "nothing was split"
    assert_splits_are_done(cuda_ops)
    assert_close(first, attend(cpu_ops, inputs), dtype)
    for _ in range(4):
        np.testing.assert_array_equal(bits(attend(cuda_ops, inputs)), bits(first))
    assert_splits_are_done(cuda_ops)


def test_keys_of_short_rows_are_not_split(cuda_ops: CudaOps) -> None:
    """So no bit of their results depends on what else is in the step."""
    partials = poison_splits(cuda_ops)
    attend(cuda_ops, AttentionInputs(AttentionCase("", ((200, 1023), (2, 500)), head_dim=128, dtype=bfloat16)))
    window = AttentionCase("", ((50, 3000),), head_dim=128, sliding_window=1023, dtype=bfloat16)
    attend(cuda_ops, AttentionInputs(window))
    assert partials is None or np.isnan(partials.numpy()).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_graph_with_splits_follows_the_lengths(head_dim: int, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    """Three layers a graph, so that kernels overlap and find what the one before them left."""
    rows = ((70, 5000), (1, 300), (9, 2500))
    inputs = AttentionInputs(AttentionCase("", rows, num_heads=8, head_dim=head_dim, dtype=bfloat16))
    case, device = inputs.case, cuda_ops.device
    caches, metadata, q = inputs.caches(device), inputs.metadata(device), from_numpy(inputs.q, device)
    outs = [poisoned(inputs.q.shape, bfloat16, device) for _ in range(3)]

    def run() -> None:
        for out in outs:
            cuda_ops.paged_attention(q, *caches, metadata, scale=case.scale, out=out)

    run()
    with device.capture() as finish:
        run()
    graph = finish()
    for lengths in ((5000, 300, 2500), (1023, 300, 2500), (70, 1, 9), (4999, 0, 2047), (5000, 300, 2500)):
        shorter = copy.copy(inputs)
        shorter.context_lens = np.array(lengths, np.int32)
        fresh = shorter.metadata(device)
        for name in ("table_rows", "context_lens"):
            getattr(metadata, name).upload(getattr(fresh, name).numpy())
        expected = attend(cpu_ops, shorter)
        poison_splits(cuda_ops)
        for replay in range(3):
            for out in outs:
                out.upload(np.full(inputs.q.shape, np.nan, bfloat16))
            graph.launch()
            device.synchronize()
            found = [out.numpy() for out in outs]
            for result in found:
                np.testing.assert_array_equal(bits(result), bits(found[0]), f"{lengths}, replay {replay}")
            assert_close(found[0], expected, bfloat16)
        assert_splits_are_done(cuda_ops)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_launch_right_behind_another_takes_tiles_of_its_own(head_dim: int, cuda_ops: CudaOps) -> None:
    """It begins while blocks of the one before still take theirs, and no kernel in between waits for these."""
    rows = ((70, 70), (400, 900), (33, 33), (200, 200)) * 4
    inputs = AttentionInputs(
        AttentionCase("", rows, num_heads=16, num_kv_heads=16, head_dim=head_dim, dtype=bfloat16, sliding_window=300)
    )
    expected = attend(cuda_ops, inputs)
    device, case = cuda_ops.device, inputs.case
    caches, metadata, q = inputs.caches(device), inputs.metadata(device), from_numpy(inputs.q, device)
    outs = [poisoned(inputs.q.shape, bfloat16, device) for _ in range(8)]
    cuda_ops.paged_attention(q, *caches, metadata, scale=case.scale, sliding_window=300, out=outs[0])
    with device.capture() as finish:
        for out in outs:
            cuda_ops.paged_attention(q, *caches, metadata, scale=case.scale, sliding_window=300, out=out)
    graph = finish()
    for _ in range(5):
        for out in outs:
            out.upload(np.full(inputs.q.shape, np.nan, bfloat16))
        graph.launch()
        device.synchronize()
        for out in outs:
            np.testing.assert_array_equal(bits(out.numpy()), bits(expected))


def test_paged_attention_of_nothing(cuda_ops: CudaOps) -> None:
    assert attend(cuda_ops, AttentionInputs(AttentionCase("", ()))).shape == (0, 64)


@dtypes
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_decode_row_is_bit_for_bit_what_it_is_alone(head_dim: int, dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    rows = ((1, 40), (1, 900), (1, 1), (1, 300), (9, 2000), (1, 0), (1, 700))
    together = AttentionInputs(AttentionCase("", rows, head_dim=head_dim, dtype=dtype))
    expected = attend(cuda_ops, together)
    for row, (queries, context) in enumerate(rows):
        alone = AttentionInputs(AttentionCase("", ((queries, context),), head_dim=head_dim, dtype=dtype))
        tokens = slice(together.cu_seqlens_q[row], together.cu_seqlens_q[row + 1])
        alone.key_cache, alone.value_cache = together.key_cache, together.value_cache
        alone.block_tables, alone.q = together.block_tables[row : row + 1], together.q[tokens]
        np.testing.assert_array_equal(attend(cuda_ops, alone), expected[tokens])


@dtypes
@pytest.mark.parametrize("sliding_window", [None, 9])
def test_chunks_of_a_prefill_equal_the_whole(
    sliding_window: int | None, dtype: np.dtype[Any], cuda_ops: CudaOps
) -> None:
    case = AttentionCase("", ((90, 90),), head_dim=64, sliding_window=sliding_window, dtype=dtype)
    whole = AttentionInputs(case)
    expected = attend(cuda_ops, whole)
    for chunk in (1, 7, 64):
        for start in range(0, 90, chunk):
            end = min(start + chunk, 90)
            part = AttentionInputs(replace(case, rows=((end - start, end),)))
            part.key_cache, part.value_cache = whole.key_cache, whole.value_cache
            part.block_tables, part.q = whole.block_tables, whole.q[start:end]
            assert_close(attend(cuda_ops, part), expected[start:end], dtype)


@dtypes
@pytest.mark.parametrize("head_dim", [16, 64])
def test_a_broken_row_stays_alone(head_dim: int, dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    inputs = AttentionInputs(AttentionCase("", ((1, 30), (4, 30), (1, 30)), head_dim=head_dim, dtype=dtype))
    expected = attend(cuda_ops, inputs)
    inputs.key_cache[inputs.block_tables[0, 0]] = np.nan
    result = attend(cuda_ops, inputs)
    assert np.isnan(result[0].astype(np.float32)).all()
    np.testing.assert_array_equal(result[1:], expected[1:])


def test_attention_refuses_inputs_of_another_device_or_dtype(cuda_ops: CudaOps) -> None:
    inputs = AttentionInputs(AttentionCase("", ((2, 2),)))
    caches, q = inputs.caches(cuda_ops.device), from_numpy(inputs.q, cuda_ops.device)
    with pytest.raises(TesseraError, match=r"positions is on cpu, but .* on cuda:0"):
        cuda_ops.paged_attention(q, *caches, inputs.metadata(CPU), scale=1)
    half = from_numpy(inputs.q.astype(float16), cuda_ops.device)
    with pytest.raises(TesseraError, match="do not fit"):
        cuda_ops.paged_attention(half, *caches, inputs.metadata(cuda_ops.device), scale=1)
    assert q.dtype == float32
