"""What prefill attention would launch on sm_90a, on a device that only writes it down."""

from __future__ import annotations

import numpy as np
import pytest

from engine.ops.cuda import CudaOps
from engine.ops.cuda import attention_prefill_hopper as prefill_hopper
from engine.tensor import bfloat16, empty, float16, float32
from tests.test_cuda_launch_attention import WritingDevice, attention_step

HOPPER_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("shape", prefill_hopper.SHAPES.values(), ids=str)
def test_prefill_on_hopper_has_no_more_blocks_than_run(shape: prefill_hopper.HopperShape) -> None:
    for num_tokens, num_seqs in ((2, 1), (512, 1), (8192, 64), (1 << 20, 4096)):
        tiles = prefill_hopper.most_tiles(shape, num_tokens, num_seqs, 32, 8)
        assert tiles >= num_tokens * 4 / shape.tile_rows * 8
        config = prefill_hopper.prefill_config(shape, tiles, 132)
        assert config.grid == (min(tiles, 132), 1, 1)
        assert config.block[0] <= 512
        assert config.shared_bytes + 512 <= HOPPER_SHARED_BYTES


def test_heads_are_read_in_parts_of_equal_size() -> None:
    for num_kv_heads in (1, 8, 12, 128):
        for num_keys in (0, 100, 8192, 40_000, 1 << 20):
            heads = prefill_hopper.heads_at_once(num_keys, num_kv_heads, 128)
            assert 1 <= heads <= num_kv_heads
            assert heads == 1 or heads * num_keys * 128 * 4 <= prefill_hopper.NEAR_BYTES
            assert -(-num_kv_heads // heads) * heads - num_kv_heads < heads


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "block_size", "hopper"),
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
def test_only_what_fits_takes_the_kernel_of_hopper(
    arch: str,
    dtype: np.dtype[np.generic],
    head_dim: int,
    block_size: int,
    hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_hopper, "row_groups_map", lambda *description: bytes(128))  # needs the driver
    device = WritingDevice(arch=arch)
    q, cache, metadata = attention_step(device, [7, 1], [7, 30], 8, 2, head_dim)
    q = empty(q.shape, dtype, device)
    cache = empty((64, 2, block_size, head_dim), dtype, device)
    for portable in (False, True):
        ops = CudaOps(device)  # type: ignore[arg-type]
        ops.hopper_prefill = not portable
        device.launches.clear()
        ops.paged_attention(q, cache, cache, metadata, scale=0.1)
        launches = [launch for launch in device.launches if launch.spec in prefill_hopper.SPECS]
        assert len(launches) == (hopper and not portable)
        for launch in launches:
            assert (launch.spec, launch.template) in prefill_hopper.instantiations(("__nv_bfloat16", "__half"))
            assert len(launch.arguments) == len(launch.spec.parameters)
