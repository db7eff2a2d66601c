"""Which kernels a mixture of few tokens is launched with, without a GPU."""

from __future__ import annotations

import pytest

from tessera.engine.ops.cuda.moe import decode, router

H200_BYTES, SMALL_BYTES = 227 << 10, 99 << 10  # of shared memory that a block may have


@pytest.mark.parametrize(("num_pairs", "tokens"), [(8, 8), (512, 8), (513, 16), (1024, 16)])
def test_a_multiprocessor_has_room_for_two_blocks(num_pairs: int, tokens: int) -> None:
    tile = decode.choose_tile(num_pairs, 128, H200_BYTES)
    assert tile is not None
    assert tile.tokens == tokens
    assert 2 * (tile.shared_bytes + decode.STATIC_BYTES + decode.RESERVED_BYTES) <= 228 << 10


def test_small_devices_have_shorter_rings_and_many_rows_other_kernels() -> None:
    assert decode.choose_tile(8, 128, SMALL_BYTES) == decode.ExpertDecodeTile(8, 4, 4)
    assert decode.choose_tile(1024, 128, SMALL_BYTES) == decode.ExpertDecodeTile(16, 4, 3)
    assert decode.choose_tile(1025, 128, H200_BYTES) is None


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "in_features", "expected"),
    [
        (1, 128, 2048, router.RouterTile(8, 2, 8)),
        (16, 128, 2048, router.RouterTile(16, 2, 8)),
        (17, 64, 2048, router.RouterTile(8, 1, 8)),
        (8, 32, 2880, router.RouterTile(8, 1, 12)),
        (1, 129, 2048, None),
        (1, 8, 4096, None),
        (129, 128, 2048, None),
    ],
)
def test_routers(num_tokens: int, num_experts: int, in_features: int, expected: router.RouterTile | None) -> None:
    assert router.choose_tile(num_tokens, num_experts, in_features, H200_BYTES) == expected
