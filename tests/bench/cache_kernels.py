"""Attention over a KV cache of e4m3 beside one of bfloat16: `python -m tests.bench.cache_kernels`.

A table of microseconds and, of decodes, of gigabytes read a second.
"""

from __future__ import annotations

from collections.abc import Iterator

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.tensor import bfloat16, uint8
from tests.bench import kernels

HEADS = (32, 8)
# Rows, queries of each, context.
SHAPES = (
    *((rows, 1, context) for rows in (1, 16, 64, 256) for context in (384, 640)),
    *((rows, 1, 6000) for rows in (1, 32)),
    *((1, queries, context) for queries, context in ((512, 512), (2048, 8192), (8192, 8192))),
    (8, 1024, 1024),
)


def measure(ops: CudaOps, device: CudaDevice) -> Iterator[tuple[kernels.Row, kernels.Row]]:
    """Of each shape the row of bfloat16 and that of e4m3."""
    ops.reserve_attention(256, HEADS[0], kernels.HEAD_DIM)
    for rows, queries, context in SHAPES:
        of_bfloat16, of_e4m3 = (
            kernels._attention(ops, device, *HEADS, rows, queries, context, None, cached)
            for cached in (bfloat16, uint8)
        )
        yield of_bfloat16, of_e4m3


def main() -> None:
    device = CudaDevice()
    ops = CudaOps(device)
    for e4m3_cache in (False, True):
        ops.compile(bfloat16, head_dims={kernels.HEAD_DIM}, e4m3_cache=e4m3_cache)
    print("shape | bfloat16 us (GB/s) | e4m3 us (GB/s)")
    for pair in measure(ops, device):
        print(pair[0]["shape"], *(f"{row['us']:.1f} ({row['GB/s']:.0f})" for row in pair), sep=" | ")


if __name__ == "__main__":
    main()
