"""Decode steps on CUDA, rotary embedding, KV store and attention in one kernel, against the NumPy implementation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from tessera.engine.cuda.driver import check
from tessera.engine.cuda.kernel import LaunchConfig
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import decode, division
from tessera.engine.ops.cuda.attention.decode import decode_config
from tessera.engine.ops.cuda.attention.division import NO_LIMIT, Division
from tessera.engine.ops.cuda.types import E4M3, WARP_SIZE
from tessera.engine.ops.interface import HeadTransform
from tessera.engine.tensor import bfloat16, from_numpy
from tests.gpu.attention.decode_inputs import DecodeInputs
from tests.support.cases.op_cases import DECODE_ROWS, DTYPES, AttentionCase, AttentionInputs, poisoned
from tests.support.references.reference import assert_close, assert_same_cache, bits

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

PAIRED = ((1, 2048), (1, 1), (1, 0), (1, 128), (1, 129), *DECODE_ROWS[:11])  # as many as clusters of two blocks are for
SINGLE = ((1, 1), (1, 40), (1, 900), (1, 0), (1, 17), (1, 64), (1, 65), (1, 2500), (1, 128))
DECODE_CASES = [
    AttentionCase("plain", SINGLE, head_dim=128, num_heads=4, num_kv_heads=2),
    AttentionCase("head_dim_64", SINGLE, head_dim=64, num_heads=8, num_kv_heads=2, padding=3),
    AttentionCase("head_dim_96", SINGLE, head_dim=96, num_heads=3, num_kv_heads=3, block_size=32),
    AttentionCase("head_dim_256", SINGLE, head_dim=256, num_heads=4, num_kv_heads=1),
    AttentionCase("window", SINGLE, head_dim=128, sliding_window=77, block_size=8),
    AttentionCase("window_of_one", SINGLE, head_dim=64, sliding_window=1),
    AttentionCase("group_32", SINGLE, head_dim=64, num_heads=32, num_kv_heads=1),
    AttentionCase("rows_without_queries", ((0, 30), *SINGLE, (0, 0)), head_dim=64, padding=2),
    AttentionCase("only_padding", ((1, 0), (1, 0)), head_dim=64),
    AttentionCase("general", SINGLE, head_dim=72),
    AttentionCase("head_dim_80", SINGLE, head_dim=80, num_heads=5, num_kv_heads=5),
    AttentionCase("head_dim_80_group", SINGLE, head_dim=80, num_heads=8, num_kv_heads=1, sliding_window=70),
    AttentionCase("soft_cap", SINGLE, head_dim=128, soft_cap=1.5),
    AttentionCase("soft_cap_256", SINGLE, head_dim=256, num_heads=8, num_kv_heads=4, soft_cap=0.7, sliding_window=90),
    AttentionCase("soft_cap_general", SINGLE, head_dim=64, soft_cap=1.5),
    AttentionCase("many_rows", DECODE_ROWS, head_dim=128, num_heads=16, num_kv_heads=4),
    AttentionCase("many_rows_8", DECODE_ROWS, head_dim=128, num_heads=16, num_kv_heads=8, sliding_window=600),
    *(
        AttentionCase(f"one_row_{length}", ((1, length),), head_dim=128, num_heads=16, num_kv_heads=8, padding=padding)
        for length, padding in ((1, 0), (17, 2), (64, 0), (65, 0), (500, 0), (513, 1), (2048, 0), (2049, 0))
    ),
    AttentionCase("one_row_window", ((1, 1500),), head_dim=64, num_heads=8, sliding_window=333, block_size=8),
    AttentionCase("one_row_group_32", ((1, 700),), head_dim=64, num_heads=32, num_kv_heads=1),
    AttentionCase("one_row_80", ((1, 700),), head_dim=80, num_heads=6, num_kv_heads=2),
    AttentionCase("one_row_soft_cap", ((1, 700),), head_dim=256, num_heads=8, num_kv_heads=4, soft_cap=1.5),
    AttentionCase("one_row_96", ((1, 700),), head_dim=96, num_heads=6, num_kv_heads=2),
    AttentionCase("one_row_256", ((1, 700),), head_dim=256, num_heads=12, num_kv_heads=1),
    AttentionCase("one_row_without_context", ((1, 0),), head_dim=128),
    AttentionCase("paired", PAIRED, head_dim=128, num_heads=16, num_kv_heads=8, padding=3),
    AttentionCase("paired_group_4", PAIRED, head_dim=64, num_heads=32, num_kv_heads=8, sliding_window=1900),
    AttentionCase("paired_256", PAIRED[:9], head_dim=256, num_heads=24, num_kv_heads=8),
]


@pytest.fixture
def ops_in_order(cuda_ops: CudaOps) -> CudaOps:
    return CudaOps(cuda_ops.device, batch_invariant=True)


@pytest.fixture
def forgotten_plans() -> Iterator[None]:
    """Plans are remembered, also those of a replaced division."""
    decode.plan_decode.cache_clear()
    yield
    decode.plan_decode.cache_clear()


@dtypes
@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_a_decode_step(case: AttentionCase, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    step = DecodeInputs.of(replace(case, dtype=dtype))
    actual, expected = step.run(cuda_ops), step.run(cpu_ops)
    assert_close(actual[0], expected[0], dtype)
    for actual_cache, expected_cache in zip(actual[1:], expected[1:], strict=True):
        assert_same_cache(actual_cache, expected_cache, dtype)


@dtypes
@pytest.mark.parametrize(("norms", "rotary_dim"), [("", None), ("q", 64), ("k", 16), ("qk", 0)])
def test_a_decode_step_without_some_of_it(
    norms: str, rotary_dim: int | None, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    step = DecodeInputs.of(AttentionCase("", SINGLE, head_dim=128, dtype=dtype), norms, rotary_dim)
    assert_close(step.run(cuda_ops)[0], step.run(cpu_ops)[0], dtype)


@dtypes
@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.name)
def test_one_kernel_is_bit_for_bit_the_two(case: AttentionCase, dtype: np.dtype[Any], cuda_ops: CudaOps) -> None:
    """The second is for steps in which another row is being prefilled. A row by itself is divided into smaller parts,
    which changes its last bits."""
    step = DecodeInputs.of(replace(case, dtype=dtype))
    if len(case.rows) == 1:
        assert_close(step.run(cuda_ops)[0], step.run(cuda_ops, fused=False)[0], dtype)
        return
    for one, two in zip(step.run(cuda_ops), step.run(cuda_ops, fused=False), strict=True):
        np.testing.assert_array_equal(bits(one), bits(two))


@pytest.mark.usefixtures("forgotten_plans")
def test_in_order_the_number_of_blocks_changes_no_bit(ops_in_order: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    step = DecodeInputs.of(AttentionCase("", SINGLE, head_dim=128, dtype=bfloat16))
    grids: list[tuple[int, ...]] = []

    def write_down(*arguments: Any, **around: Any) -> LaunchConfig:
        grids.append((config := decode_config(*arguments, **around)).grid)
        return config

    results = []
    monkeypatch.setattr(decode, "decode_config", write_down)
    for number in (1, 2, 7, 32):
        monkeypatch.setattr(division, "splits_per_block", lambda *_, number=number: number)
        decode.plan_decode.cache_clear()
        results.append(step.run(ops_in_order))
    assert len({grid[2] for grid in grids}) == 4, "there are other blocks each time"
    for found in results[1:]:
        for actual, want in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(bits(actual), bits(want))


def test_in_order_a_row_is_bit_for_bit_what_it_is_beside_any_other(ops_in_order: CudaOps) -> None:
    rows = DECODE_ROWS[:32]
    step = DecodeInputs.of(AttentionCase("", rows, head_dim=128, num_heads=16, num_kv_heads=8, dtype=bfloat16))
    expected = step.run(ops_in_order)[0]
    for row in range(0, len(rows) - 1, 7):
        np.testing.assert_array_equal(step.rows(slice(row, row + 2)).run(ops_in_order)[0], expected[row : row + 2])
    for row in (0, 9, 22):  # as many as clusters are for
        np.testing.assert_array_equal(step.rows(slice(row, row + 10)).run(ops_in_order)[0], expected[row : row + 10])


@pytest.mark.usefixtures("forgotten_plans")
@pytest.mark.parametrize("fused", [True, False], ids=["", "two kernels"])
@pytest.mark.parametrize("even_splits", [1, 2, 3, 5])
@pytest.mark.parametrize(("most_keys", "helpers"), [(256, 40), (512, 9), (NO_LIMIT, 0)], ids=str)
def test_rows_of_any_lengths_in_any_number_of_blocks(
    most_keys: int,
    helpers: int,
    even_splits: int,
    fused: bool,
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Helpers, of which some have nothing to do, take what a row has beyond `even_splits`."""
    rows = (*DECODE_ROWS[:33], (1, 2500), (1, 2), (1, 2100))
    case = AttentionCase("", rows, head_dim=128, num_heads=4, num_kv_heads=2, sliding_window=2300, dtype=bfloat16)
    step = DecodeInputs.of(case)
    chosen = Division(1, even_splits, 128, most_keys, 13, 1, helpers)
    monkeypatch.setattr(decode, "divide", lambda *_, **__: chosen)
    assert_close(step.run(cuda_ops, fused=fused)[0], step.run(cpu_ops)[0], bfloat16)


@pytest.mark.parametrize("e4m3", [False, True], ids=["16 bits", "e4m3"])
def test_as_many_blocks_have_room_as_divisions_count_on(e4m3: bool, cuda_ops: CudaOps) -> None:
    device = cuda_ops.device
    if os.environ.get("TESSERA_EMULATED") == "1" or device.compute_capability != (9, 0):
        pytest.skip("registers are counted for sm_90")
    few, many = (
        (decode.CODE_SHAPES, decode.MANY_ROWS_CODE_SHAPES) if e4m3 else (decode.DECODE_SHAPES, decode.MANY_ROWS_SHAPES)
    )
    spec = decode.OF_E4M3[decode.PAGED_ATTENTION_DECODE] if e4m3 else decode.PAGED_ATTENTION_DECODE
    bfloat = "__nv_bfloat16"
    for shape in (*few.values(), *many.values()):
        template = (bfloat, E4M3 if e4m3 else bfloat, *shape.template(fused=True))
        resident = check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor,
            device._kernel(spec, template).function,
            shape.warps * WARP_SIZE,
            decode.block_bytes(shape, 4, e4m3=e4m3),
        )
        assert resident == decode.resident_blocks(shape, 4, device.max_shared_bytes, e4m3=e4m3), shape


def test_a_graph_of_decode_steps_follows_the_lengths(cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    """Two layers a graph, so that kernels overlap; each replay finds the counters as the last one left them."""
    case = AttentionCase("", ((1, 900), (1, 300), (1, 2500)), head_dim=128, dtype=bfloat16)
    step = DecodeInputs.of(case)
    device = cuda_ops.device
    metadata, qkv = step.inputs.metadata(device), from_numpy(step.qkv, device)
    assert step.cos_sin is not None
    transform, scale = HeadTransform(from_numpy(step.cos_sin, device)), case.scale
    layers = [step.inputs.caches(device) for _ in range(2)]
    queries, *outs = (poisoned(step.inputs.q.shape, bfloat16, device) for _ in range(3))

    def run() -> None:
        for caches, out in zip(layers, outs, strict=True):
            cuda_ops.attention(qkv, *caches, metadata, transform, num_heads=4, scale=scale, queries=queries, out=out)

    run()
    with device.capture() as finish:
        run()
    graph = finish()
    for lengths in ((900, 300, 2500), (0, 300, 70), (1, 0, 2499), (899, 17, 0)):
        rows = tuple((1, length) for length in lengths)
        shorter = DecodeInputs(AttentionInputs(replace(case, rows=rows)), step.qkv, step.cos_sin, {})
        tables = np.zeros_like(step.inputs.block_tables)
        tables[:, : shorter.inputs.block_tables.shape[1]] = shorter.inputs.block_tables
        inputs = shorter.inputs
        inputs.block_tables = tables
        fresh = inputs.metadata(device)
        for name in ("positions", "slot_mapping", "block_tables", "table_rows", "context_lens"):
            getattr(metadata, name).upload(getattr(fresh, name).numpy())
        for key_cache, value_cache in layers:
            blocks = len(inputs.key_cache)
            key_cache[:blocks].upload(inputs.key_cache)
            value_cache[:blocks].upload(inputs.value_cache)
        graph.launch()
        device.synchronize()
        expected = shorter.run(cpu_ops)[0]
        for out in outs:
            assert_close(out.numpy(), expected, bfloat16)
