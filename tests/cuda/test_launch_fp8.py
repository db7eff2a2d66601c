"""Which kernels take products of a few e4m3 rows."""

import pytest

from tessera.engine.ops.cuda.fp8 import decode, pair_decode
from tessera.engine.ops.cuda.fp8.problem import Fp8Problem

H200, H200_BYTES = 132, 227 << 10


def problem(num_rows: int, features: int, in_features: int, *, gated: bool = False) -> Fp8Problem:
    around = dict.fromkeys(("groups", "accumulates", "biased", "from_x", "normed", "in_order"), False)
    sizes = (num_rows, features * (1 + gated), in_features)
    return Fp8Problem(*sizes, "__nv_bfloat16", "__nv_bfloat16", gated=gated, out_aligned=True, **around)


@pytest.mark.parametrize(
    ("num_rows", "features", "in_features", "kept"),
    [(16, 14336, 4096, True), (2, 14336, 4096, True), (16, 3072, 4096, False), (16, 14336, 5120, False)],
)
def test_x_stays_where_there_are_several_tiles_and_room(
    num_rows: int, features: int, in_features: int, kept: bool
) -> None:
    tile = decode.choose_tile(problem(num_rows, features, in_features, gated=True), H200, H200_BYTES)
    assert tile is not None
    assert tile.keeps_x is kept


@pytest.mark.parametrize(
    ("num_rows", "features", "in_features", "paired"),
    [
        (16, 4096, 14336, True),
        (4, 4096, 14336, False),  # x is little
        (16, 4096, 4096, False),
        (16, 8192, 28672, False),  # x would come twice
    ],
)
def test_pairs_of_blocks_are_for_long_rows(num_rows: int, features: int, in_features: int, paired: bool) -> None:
    assert pair_decode.worthwhile(num_rows, features, in_features, H200) is paired
