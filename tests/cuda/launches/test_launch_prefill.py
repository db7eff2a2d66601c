"""What prefill attention would launch on sm_90a, on a device that only writes it down."""

from __future__ import annotations

import numpy as np
import pytest

from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import sm90_prefill, widen
from tessera.engine.tensor import bfloat16, empty, float16, float32, uint8
from tests.cuda.launches.written import WritingDevice, attention_step, check_params

SM90_SHARED_BYTES = 227 << 10
STATIC_BYTES = 2000  # at most: barriers, tiles of queries, their scales


@pytest.mark.parametrize("shape", sm90_prefill.SHAPES.values(), ids=str)
def test_prefill_on_sm90_has_no_more_blocks_than_run(shape: sm90_prefill.Sm90Shape) -> None:
    for num_tokens, num_seqs in ((2, 1), (512, 1), (8192, 64), (1 << 20, 4096)):
        tiles = sm90_prefill.most_tiles(shape, num_tokens, num_seqs, 32, 8)
        assert tiles >= num_tokens * 4 / shape.tile_rows * 8
        for e4m3, by_codes in ((False, False), (True, False), (True, True)):
            config = sm90_prefill.prefill_config(shape, tiles, 132, e4m3=e4m3, by_codes=by_codes)
            assert config.grid == (min(tiles, 132), 1, 1)
            assert config.block[0] <= 512
            assert config.shared_bytes + STATIC_BYTES <= SM90_SHARED_BYTES


def splits_of_tile(newest: int, first_position: int, context_len: int, window: int) -> int:
    """The most that `PrefillUnits::find` makes of a tile whose queries are at these positions."""
    if min(context_len, window) < 2 * sm90_prefill.MIN_SPLIT_TILES * widen.TILE_KEYS:
        return 1
    key_begin = max(first_position - window + 1, 0) // widen.TILE_KEYS * widen.TILE_KEYS
    key_tiles = -(-(newest + 1 - key_begin) // widen.TILE_KEYS)
    return max(min(key_tiles // sm90_prefill.MIN_SPLIT_TILES, sm90_prefill.MAX_SPLITS), 1)


@pytest.mark.parametrize("window", [1 << 30, 1, 1000, 1024, 1500, 4097])
def test_no_tile_has_more_splits_than_said(window: int) -> None:
    for context_len in (2, 1023, 1024, 1025, 2000, 8192, 131072):
        for queries in {2, min(context_len, 190), min(context_len, 3000)}:
            most = sm90_prefill.most_splits(min(context_len, queries + window))
            assert 1 <= most <= sm90_prefill.MAX_SPLITS
            for first in range(context_len - queries, context_len, 97):
                newest = min(first + 191, context_len - 1)
                assert splits_of_tile(newest, first, context_len, window) <= most


@pytest.mark.parametrize("head_dim", sm90_prefill.SHAPES)
def test_grid_has_room_for_splits_of_long_contexts_alone(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_prefill, "row_groups_map", lambda *description: bytes(128))  # needs the driver
    blocks = {}
    for context_len in (500, 1023, 1024, 8000):
        device = WritingDevice(arch="90a")
        q, cache, metadata = attention_step(device, [100], [context_len], 4, 2, head_dim)
        CudaOps(device).paged_attention(q, cache, cache, metadata, scale=0.1)  # type: ignore[arg-type]
        (launch,) = (launch for launch in device.launches if launch.spec in sm90_prefill.SPECS)
        blocks[context_len] = launch.config.grid[0]
    tiles = sm90_prefill.most_tiles(sm90_prefill.SHAPES[head_dim], 100, 1, 4, 2)
    assert blocks == {500: tiles, 1023: tiles, 1024: 2 * tiles, 8000: min(16 * tiles, 132)}


def test_splits_of_any_launch_find_memory_that_is_reserved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_prefill, "row_groups_map", lambda *description: bytes(128))
    device = WritingDevice(arch="90a")
    ops = CudaOps(device)  # type: ignore[arg-type]
    ops.reserve_attention(64, 32, 128)
    memory = sm90_prefill.splits_of(ops.attention_memory)
    assert memory.partials.nbytes < 10 << 20
    device.allocated.clear()
    for head_dim, shape in sm90_prefill.SHAPES.items():
        ops.reserve_attention(64, 16, head_dim)
        outputs, sums, arrivals = sm90_prefill.split_pointers(memory, shape, device.multiprocessors)
        rows = device.multiprocessors * shape.tile_rows
        assert sums - outputs == rows * head_dim * 4
        assert sums + rows * 2 * 4 <= outputs + memory.partials.nbytes
        assert device.multiprocessors * shape.consumers <= memory.arrivals.size
        for queries, context_len in ((2, 9000), (300, 300), (3000, 131072)):
            q, cache, metadata = attention_step(device, [queries, 1], [context_len, 7], 8, 2, head_dim)
            device.allocated.clear()
            ops.paged_attention(q, cache, cache, metadata, scale=0.1, out=q)
            assert device.allocated == []
            (launch,) = (launch for launch in device.launches if launch.spec in sm90_prefill.SPECS)
            params = launch.params._asdict()
            assert params["arrivals"] == arrivals
            assert params["partial_out"] == outputs
            device.launches.clear()


def test_heads_are_read_in_parts_of_equal_size() -> None:
    for num_kv_heads in (1, 8, 12, 128):
        for num_keys in (0, 100, 8192, 40_000, 1 << 20):
            heads = sm90_prefill.heads_at_once(num_keys, num_kv_heads, 4 * 128)
            assert 1 <= heads <= num_kv_heads
            assert heads == 1 or heads * num_keys * 128 * 4 <= sm90_prefill.NEAR_BYTES
            assert -(-num_kv_heads // heads) * heads - num_kv_heads < heads


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "block_size", "sm90"),
    [
        ("90a", bfloat16, 128, 16, True),
        ("90a", float16, 64, 24, True),
        ("90a", bfloat16, 128, 20, False),
        ("90a", bfloat16, 96, 16, False),
        ("90a", float32, 128, 16, False),
        ("100a", bfloat16, 128, 16, False),
        ("80", bfloat16, 128, 16, False),
    ],
)
def test_only_what_fits_takes_the_kernel_of_sm90a(
    arch: str,
    dtype: np.dtype[np.generic],
    head_dim: int,
    block_size: int,
    sm90: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sm90_prefill, "row_groups_map", lambda *description: bytes(128))  # needs the driver
    device = WritingDevice(arch=arch)
    q, cache, metadata = attention_step(device, [7, 1], [7, 30], 8, 2, head_dim)
    q = empty(q.shape, dtype, device)
    cache = empty((64, 2, block_size, head_dim), dtype, device)
    for portable in (False, True):
        ops = CudaOps(device)  # type: ignore[arg-type]
        ops.attention_kernels.restrict(without=("sm90_prefill",) if portable else ())
        device.launches.clear()
        ops.paged_attention(q, cache, cache, metadata, scale=0.1)
        launches = [launch for launch in device.launches if launch.spec in sm90_prefill.SPECS]
        assert len(launches) == (sm90 and not portable)
        for launch in launches:
            assert (launch.spec, launch.template) in sm90_prefill.instantiations(("__nv_bfloat16", "__half"))
            check_params(launch)


@pytest.mark.parametrize(
    ("queries", "context_len", "widens"), [(600, 9000, True), (600, 900, False), (300, 9000, False)]
)
def test_long_prompts_over_e4m3_are_widened_first(
    queries: int, context_len: int, widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm90_prefill, "row_groups_map", lambda *description: bytes(128))
    device = WritingDevice(arch="90a")
    ops = CudaOps(device)  # type: ignore[arg-type]
    ops.reserve_attention(64, 32, 128, e4m3_cache=True)
    q, cache, metadata = attention_step(device, [queries, 1], [context_len, 7], 32, 8, 128)
    cache = empty(cache.shape, uint8, device)
    device.allocated.clear()
    ops.paged_attention(q, cache, cache, metadata, scale=0.1, out=q)
    assert device.allocated == [], "graphs keep addresses"
    kernels = [launch.spec for launch in device.launches]
    assert (widen.WIDEN_CACHE in kernels) == widens
    prefill = next(launch for launch in device.launches if launch.spec in sm90_prefill.SPECS)
    assert (prefill.params._asdict()["first_tiles"] is not None) == widens
    if widens:
        launch = device.launches[kernels.index(widen.WIDEN_CACHE)]
        assert kernels.index(widen.WIDEN_CACHE) < kernels.index(prefill.spec)
        assert (launch.spec, launch.template) in widen.instantiations(("__nv_bfloat16",))
        check_params(launch)
