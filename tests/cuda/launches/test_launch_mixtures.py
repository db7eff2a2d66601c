"""Which kernels a mixture of few tokens is launched with, without a GPU."""

from __future__ import annotations

import pytest

from tessera.engine.ops.cuda.linear.decode import Limits
from tessera.engine.ops.cuda.moe import decode, mxfp4, router

H200_BYTES, SMALL_BYTES = 227 << 10, 99 << 10  # of shared memory that a block may have
H200 = Limits(132, H200_BYTES)
UP, DOWN = 48, 64  # tiles of columns of Qwen3-30B-A3B


def size_of(tile: decode.ExpertDecodeTile) -> int:
    """Of a multiprocessor's shared memory, for a block."""
    return tile.shared_bytes + decode.STATIC_BYTES + decode.RESERVED_BYTES


def chosen(num_pairs: int, columns: int, limits: Limits, *, behind: bool) -> tuple[decode.ExpertDecodeTile, int]:
    found = decode.choose_tile(num_pairs, 128, columns, limits, behind=behind)
    assert found is not None
    return found


def test_up_and_down_of_one_token_share_multiprocessors_and_no_two_ups_do() -> None:
    (up, up_blocks), (down, down_blocks) = (chosen(8, UP, H200, behind=False), chosen(8, DOWN, H200, behind=True))
    assert up_blocks == down_blocks == 132
    assert size_of(up) + size_of(down) <= 228 << 10 < 2 * size_of(up)


@pytest.mark.parametrize(("num_pairs", "tokens"), [(128, 8), (512, 8), (513, 16), (1024, 16)])
def test_a_multiprocessor_has_room_for_two_blocks(num_pairs: int, tokens: int) -> None:
    tile, blocks = chosen(num_pairs, UP, H200, behind=False)
    assert (tile.tokens, blocks) == (tokens, 264)
    assert 2 * size_of(tile) <= 228 << 10


def test_small_devices_have_shorter_rings_and_many_rows_other_kernels() -> None:
    small = Limits(128, SMALL_BYTES)
    assert chosen(8, UP, small, behind=False) == (decode.ExpertDecodeTile(8, 4, 4), 128)
    assert chosen(1024, UP, small, behind=False) == (decode.ExpertDecodeTile(16, 4, 3), 128)
    assert decode.choose_tile(1025, 128, UP, H200, behind=False) is None


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "in_features", "expected"),
    [
        (1, 128, 2048, router.RouterTile(1, 2, 8)),
        (9, 128, 2048, router.RouterTile(16, 2, 8)),
        (16, 32, 2880, router.RouterTile(16, 1, 12)),
        (17, 64, 2048, router.RouterTile(8, 1, 8)),
        (8, 32, 2880, router.RouterTile(8, 1, 12)),
        (1, 129, 2048, None),
        (1, 8, 4096, None),
        (129, 128, 2048, None),
    ],
)
def test_routers(num_tokens: int, num_experts: int, in_features: int, expected: router.RouterTile | None) -> None:
    assert router.choose_tile(num_tokens, num_experts, in_features, H200_BYTES) == expected


@pytest.mark.parametrize(
    ("num_tokens", "tokens", "blocks"), [(1, 8, 2), (8, 8, 2), (16, 16, 1), (64, 16, 1), (128, 32, 1)]
)
def test_experts_in_mxfp4_of_gpt_oss(num_tokens: int, tokens: int, blocks: int) -> None:
    """Rows of x and rings leave as many blocks a multiprocessor as their warps."""
    tile = mxfp4.choose_tile(num_tokens * 4, 32, 4)
    assert (tile.tokens, tile.blocks(2880, H200_BYTES)) == (tokens, blocks)
