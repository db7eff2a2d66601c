"""Which variants of the FP8 kernels products of a few rows take, on a machine that needs no GPU."""

from __future__ import annotations

import pytest

from tessera.engine.ops.cuda.fp8 import decode, sm90_rows
from tessera.engine.ops.cuda.fp8.problem import Fp8Problem
from tessera.engine.ops.cuda.types import ceil_div

MULTIPROCESSORS, SHARED_BYTES = 132, 227 << 10
MULTIPROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
# Of Llama 3 8B: rows and columns of the weights of queries, keys and values, of attention's output, of gate and up, of
# down.
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def product(num_rows: int, index: int) -> Fp8Problem:
    features, in_features = LLAMA_8B[index]
    dtype, starts = "__nv_bfloat16", index in (0, 2)
    return Fp8Problem(
        num_rows,
        features,
        in_features,
        dtype,
        dtype,
        groups=False,
        gated=index == 2,
        accumulates=not starts,
        biased=False,
        from_x=False,
        normed=starts,
        out_aligned=True,
        in_order=False,
    )


@pytest.mark.parametrize("num_rows", [2, 8, 9, 16])
def test_products_around_attention_leave_half_of_a_multiprocessor(num_rows: int) -> None:
    """Of several rows; two blocks of one do not fit. The long ones take what they can have."""
    for index in range(len(LLAMA_8B)):
        problem = product(num_rows, index)
        tile = decode.choose_tile(problem, MULTIPROCESSORS, SHARED_BYTES)
        assert tile is not None
        used = tile.shared_bytes(problem.in_features)
        asked = decode.launch_bytes(problem, tile, MULTIPROCESSORS, SHARED_BYTES)
        assert 2 * (asked + RESERVED_BYTES) > MULTIPROCESSOR_BYTES
        assert (asked == SHARED_BYTES // 2) == (index < 2)
        assert index < 2 or (used == asked and tile.stages == 3)


def test_a_ring_that_holds_all_weights_of_a_block_asks_for_no_more() -> None:
    problem = product(16, 0)._replace(weight_rows=4096, in_features=1024)
    tile = decode.choose_tile(problem, MULTIPROCESSORS, SHARED_BYTES)
    assert tile == decode.Fp8DecodeTile(16, 4, 2)
    assert decode.launch_bytes(problem, tile, MULTIPROCESSORS, SHARED_BYTES) == tile.shared_bytes(1024)


@pytest.mark.parametrize("num_rows", [16, 32])
def test_a_stage_of_a_ring_that_goes_round_is_always_one_groups(num_rows: int) -> None:
    """A group cannot tell the first phase of a stage's barrier from the third, if the second was another group's."""
    for features in range(16, 40_000, 1000):
        for in_features in (512, 656, 1104, 4096, 14336):
            problem = product(num_rows, 0)._replace(weight_rows=features, in_features=in_features)
            plan = sm90_rows.choose_plan(problem, MULTIPROCESSORS, SHARED_BYTES)
            slabs = ceil_div(features // 16, plan.blocks)
            steps = ceil_div(slabs, plan.stage.slabs) * ceil_div(in_features, plan.stage.fold * 128)
            assert plan.stages % sm90_rows.GROUPS == 0 or plan.stages >= steps
