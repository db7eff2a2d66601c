"""Microseconds of products by GGUF's blocks: `python -m tests.bench.block_kernels [TYPE ...]`.

Each figure with its share of the time in which the blocks alone could be read, and beside it dense products of the
same shape; with --tiles every variant of the kernel that the rows fit, with --kernels those for many rows on sm_90a,
with --int8 such products in 8 bits.
With --layers instead: a layer's products of one row behind each other, as decode steps have them, by TMA and by lanes'
copies, and beside them the sum of each alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import KERNEL_FORMATS, LinearWeight, PackedFormat, WeightPart
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.int8 import ops as int8_ops
from tessera.engine.ops.cuda.quant import product, sm90_fragments, sm90_product, sm90_row
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.tensor import bfloat16, empty
from tests.bench.kernels import CALLS, COLD_BYTES, READ_GB_S, measure, random_tensor

TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q5_K")
SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256), (1024, 4096), (3072, 1024))
ROWS = (1, 4, 8, 16, 32, 64, 256)
# Of Llama 3 8B: hidden size, width of q and k, of v, and between. The product of v has few blocks, as attention has.
HIDDEN, QK, V, INTER = 4096, 5120, 1024, 14336
LAYERS = 16
SLICES = (1, 2, 4)  # of k, that are measured
LEAST_MANY_ROWS = 9  # from which on the kernels for many rows are measured


def random_part(ops: CudaOps, format: PackedFormat, features: int, in_features: int, bits: Any) -> WeightPart:
    part = WeightPart.empty(format, features, in_features, ops.device)
    for tensor in part.tensors.values():
        repeated = np.resize(bits, tensor.size).reshape(tensor.shape)
        tensor.upload(repeated)
    return part


def measure_shape(
    ops: CudaOps,
    device: CudaDevice,
    format: PackedFormat,
    shape: tuple[int, int],
    *,
    tiles: bool,
    kernels: bool,
    int8: bool,
    rows: Sequence[int],
    bits: Any,
) -> None:
    k, n = shape
    nbytes = format.nbytes(n, k)
    copies = max(1, min(CALLS, COLD_BYTES // nbytes))
    weights = [LinearWeight((random_part(ops, format, n, k, bits),)) for _ in range(copies)]
    ops.reserve_linear(weights, np.dtype(bfloat16))
    for m in rows:
        x, out = random_tensor(ops, m, k), empty((m, n), bfloat16, device)
        calls = [partial(ops.linear, x, weights[i % copies], out=out) for i in range(CALLS)]
        chosen = measure(device, calls)
        cells = [f"{chosen:8.1f} us {nbytes / chosen / 1e3 / READ_GB_S:5.0%}"]
        if tiles:
            for tile in (tile for of_tokens in product.TILES.values() for tile in of_tokens):
                if tile.fits(format, k, device.max_shared_bytes, normed=False) and (tile.tokens > 1 or m == 1):
                    saved, product.TILES = product.TILES, {tile.tokens: (tile,)}
                    most, product.MAX_ROWS_TMA = product.MAX_ROWS_TMA, 0
                    many, product.MIN_ROWS_SM90 = product.MIN_ROWS_SM90, 1 << 30
                    try:
                        cells.append(
                            f"{tile.tokens}/{tile.units}/{tile.stages}/{tile.blocks} {measure(device, calls):.1f}"
                        )
                    finally:
                        product.TILES, product.MAX_ROWS_TMA, product.MIN_ROWS_SM90 = saved, most, many
            least, product.MIN_ROWS_SM90 = product.MIN_ROWS_SM90, 1 if m < product.MIN_ROWS_SM90 else 1 << 30
            cells.append(f"{'wgmma' if m < least else 'without wgmma'} {measure(device, calls):.1f}")
            product.MIN_ROWS_SM90 = least
        if int8:
            cells.append(f"int8 {_in_8_bits(ops, device, weights, calls, m):.1f}")
        if kernels:
            cells += [f"{name} {time:.1f}" for name, time in _each_of_many_rows(device, calls, m, format)]
        print(f"{format.kernel_type:13}{m:>4} x {k:>6} x {n:>6} " + "  ".join(cells), flush=True)


def _in_8_bits(
    ops: CudaOps, device: CudaDevice, weights: Sequence[LinearWeight], calls: Sequence[Callable[[], object]], m: int
) -> float:
    """Microseconds of the products of `m` rows, with bringing weights and rows to int8."""
    with mock.patch.object(int8_ops, "FEW_ROWS", m - 1), mock.patch.object(ops, "rounds_many_rows", True):
        ops.reserve_linear(weights, np.dtype(bfloat16), m)
        return measure(device, calls)


def _each_of_many_rows(
    device: CudaDevice, calls: Sequence[Callable[[], object]], m: int, format: PackedFormat
) -> Iterator[tuple[str, float]]:
    """Microseconds of each kernel for many rows on sm_90a; of the one by fragments for each tile and some numbers of
    slices: rows of x that blocks turn, and such that a kernel has turned."""
    if not sm90_product.SM90_BLOCK_MATMUL.supports(device.arch) or m < LEAST_MANY_ROWS:
        return
    kernels = sm90_product.KERNELS
    least, most = product.MIN_ROWS_SM90, product.MAX_ROWS_SM90
    product.MIN_ROWS_SM90, product.MAX_ROWS_SM90 = min(m, least), max(m, most)
    try:
        sm90_product.KERNELS = (sm90_product.SM90_BLOCK_MATMUL,)
        yield "ring", measure(device, calls)
        sm90_product.KERNELS = (sm90_fragments.SM90_BLOCK_FRAGMENTS,)
        for tile, slices, turned in itertools.product(sm90_fragments.TILES, SLICES, (False, True)):
            plan = sm90_fragments.FragmentsPlan(tile, slices=slices, turned=turned)
            if tile.tokens >= 2 * m or plan.stages(format, device.max_shared_bytes) < sm90_fragments.MIN_STAGES:
                continue
            problems: list[sm90_fragments.FragmentsProblem] = []
            with mock.patch.object(sm90_fragments, "choose_plan", partial(_always, plan, problems)):
                time = measure(device, calls)
            if slices <= problems[0].max_slices:
                yield f"{tile.warpgroups}/{tile.tokens}/{slices}{'/turned' * turned}", time
    finally:
        sm90_product.KERNELS = kernels
        product.MIN_ROWS_SM90, product.MAX_ROWS_SM90 = least, most


def _always(
    plan: sm90_fragments.FragmentsPlan, problems: list[sm90_fragments.FragmentsProblem], problem: Any, *_: Any
) -> sm90_fragments.FragmentsPlan:
    """In place of `choose_plan`; what it was asked for goes to `problems`."""
    problems.append(problem)
    return plan


def measure_layers(ops: CudaOps, device: CudaDevice, format: PackedFormat, *, bits: Any) -> None:
    shapes = ((HIDDEN, QK), (HIDDEN, V), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTER), (INTER, HIDDEN))
    layers = [[LinearWeight((random_part(ops, format, n, k, bits),)) for k, n in shapes] for _ in range(LAYERS)]
    ops.reserve_linear([weight for layer in layers for weight in layer], np.dtype(bfloat16))
    residual, attended, normed, qk, v, up, between = (
        random_tensor(ops, 1, width) for width in (HIDDEN, HIDDEN, HIDDEN, QK, V, 2 * INTER, INTER)
    )
    before, gate = RMSNorm(random_tensor(ops, HIDDEN), 1e-6, normed), Activate("silu_mul", up)
    products = (
        partial(ops.linear, residual, prologue=before, out=qk),
        partial(ops.linear, residual, prologue=before, out=v),
        partial(ops.linear, attended, epilogue=Accumulate(), out=residual),
        partial(ops.linear, residual, prologue=before, epilogue=gate, out=between),
        partial(ops.linear, between, epilogue=Accumulate(), out=residual),
    )
    chain = [partial(call, weight) for layer in layers for call, weight in zip(products, layer, strict=True)]
    saved, cells = sm90_row.MIN_BITS, []
    for way, sm90_row.MIN_BITS in (("TMA", 0), ("copies", 1 << 10)):
        alone = [measure(device, chain[i :: len(products)] * 2) for i in range(len(products))]
        layer = measure(device, chain) * len(products)
        cells.append(f"{way} {layer:.1f} us, alone {sum(alone):.1f} = {' + '.join(f'{us:.1f}' for us in alone)}")
    sm90_row.MIN_BITS = saved
    print(f"{format.kernel_type:13}layer  " + "  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.block_kernels", description=__doc__)
    parser.add_argument("types", nargs="*", default=TYPES, help="(default: %(default)s)")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="each one for many rows on sm_90a")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="(default: %(default)s)")
    options = parser.parse_args()
    if unknown := set(options.types) - KERNEL_FORMATS.keys():
        sys.exit(f"no such type: {', '.join(sorted(unknown))}; there are {', '.join(KERNEL_FORMATS)}")
    device = CudaDevice(0)
    ops = CudaOps(device)
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 22, dtype=np.uint32)
    for name in options.types:
        if options.layers:
            measure_layers(ops, device, KERNEL_FORMATS[name], bits=bits)
            continue
        for shape in SHAPES:
            measure_shape(ops, device, KERNEL_FORMATS[name], shape, tiles=options.tiles, kernels=options.kernels,
                          int8=options.int8, rows=options.rows, bits=bits)  # fmt: skip


if __name__ == "__main__":
    main()
