"""Microseconds of products by e4m3 weights beside cuBLAS's: `python -m tests.bench.fp8_kernels`.

Each with its share of the memory rate at which the weight could be read. cuBLAS by `torch._scaled_mm` with scales of
rows, for rows that are e4m3 already; ours both so and with the quantising (in brackets).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import Fp8Format, LinearWeight, WeightPart
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.fp8 import decode, sm90
from tessera.engine.ops.cuda.fp8.problem import Fp8Operands, Fp8Problem
from tessera.engine.ops.cuda.linear.quantize_rows import quantized, scratch_bytes
from tessera.engine.ops.cuda.types import cuda_type
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.tensor import Tensor, bfloat16, empty, uint8
from tests.bench.kernels import CALLS, COLD_BYTES, LAYERS, READ_GB_S, TorchReference, measure, random_tensor

SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (1024, 4096), (1024, 6144), (3072, 1024))
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
LAYER_ROWS = (1, 4, 16, 64, 128, 256)
QUANTISED = ((8192, 4096, False), (8192, 4096, True), (8192, 14336, False), (16, 4096, True))
FEW_ROWS = (1, 4, 16)
MIN_SHARING_ROWS = 1024
BRIEF_SHAPES = SHAPES[:4]
BRIEF_ROWS = (1, 16, 64, 512, 8192)
SCHEMES = {"rows": Fp8Format(), "blocks": Fp8Format(block=(128, 128))}


def random_weight(ops: CudaOps, format: Fp8Format, features: int, in_features: int, codes: Any) -> LinearWeight:
    part = WeightPart.empty(format, features, in_features, ops.device)
    part.tensors["values"].upload(np.resize(codes, (features, in_features)))
    part.tensors["scales"].upload(np.full(part.tensors["scales"].shape, 1e-4, np.float32))
    return LinearWeight((part,))


class ScaledReference(TorchReference):
    """cuBLAS's FP8 product with scales of rows, of which the sums stay in the tensor cores or leave them early."""

    def scaled(self, m: int, k: int, n: int, copies: int, *, fast: bool) -> float:
        torch = self.torch
        weights = [self._random(n, k).to(torch.float8_e4m3fn) for _ in range(copies)]
        x = self._random(m, k).to(torch.float8_e4m3fn)
        of_rows, of_columns = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")

        def product(weight: Any) -> Any:
            return torch._scaled_mm(x, weight.t(), of_rows, of_columns, out_dtype=torch.bfloat16, use_fast_accum=fast)

        return self._measure([partial(product, weights[i % copies]) for i in range(CALLS)])


def bare(ops: CudaOps, weight: LinearWeight, x: Tensor, out: Tensor, rows: tuple[Tensor, Tensor]) -> None:
    """The product alone, of rows that are e4m3."""
    (part,), (values, scales) = weight.parts, rows
    problem = problem_of(part, x, out)
    choice = ops.fp8_kernels.choose(problem)
    assert choice is not None
    operands = Fp8Operands(None, None, 0.0, values, scales, part, None, out.pointer, out.shape[1])
    choice.candidate.launch(ops.device, problem, choice.plan, operands)


def problem_of(part: WeightPart, x: Tensor, out: Tensor) -> Fp8Problem:
    assert isinstance(part.format, Fp8Format)
    around = dict.fromkeys(("gated", "accumulates", "biased", "from_x", "normed", "in_order"), False)
    sizes, dtype = (x.shape[0], *part.shape), cuda_type(x.dtype)
    groups = part.format.block is not None
    return Fp8Problem(*sizes, dtype, cuda_type(out.dtype), groups, out_aligned=True, **around)


def measure_shape(
    ops: CudaOps,
    scheme: str,
    k: int,
    n: int,
    *,
    counts: tuple[int, ...] = ROWS,
    plans: bool = False,
    reference: ScaledReference | None = None,
) -> None:
    device, format = ops.device, SCHEMES[scheme]
    copies = max(1, min(CALLS, COLD_BYTES // (k * n)))
    codes = np.random.default_rng(0).integers(0x20, 0x50, k * n, dtype=np.uint8)
    weights = [random_weight(ops, format, n, k, codes) for _ in range(copies)]
    ops.reserve_linear(weights, np.dtype(bfloat16), max(counts))
    for m in counts:
        x, out = random_tensor(ops, m, k), empty((m, n), bfloat16, device)
        scratch = empty((scratch_bytes(m, k),), uint8, device)
        rows = quantized(device, x, None, 0.0, format, scratch)
        alone = measure(device, [partial(bare, ops, weights[i % copies], x, out, rows) for i in range(CALLS)])
        whole = measure(device, [partial(ops.linear, x, weights[i % copies], out=out) for i in range(CALLS)])
        problem = problem_of(weights[0].parts[0], x, out)
        choice = ops.fp8_kernels.choose(problem)
        assert choice is not None
        cells = [f"{alone:8.1f} us ({whole:.1f}) {k * n / alone / 1e3 / READ_GB_S:4.0%}"]
        cells.append(f"{2 * m * k * n / alone / 1e6:5.0f} TFLOP/s")
        if reference is not None and scheme == "rows":
            for fast in (False, True):
                theirs = reference.scaled(m, k, n, copies, fast=fast)
                cells.append(f"cuBLAS {'fast' if fast else ''} {theirs:.1f} ({theirs / alone:.2f})")
        cells.append(f"{choice.candidate.name} {choice.plan}")
        if plans:
            cells += _all_plans(ops, problem, weights, x, out, rows)
        print(f"{scheme:6} {m:>4} x {k:>5} x {n:>5} " + "  ".join(cells), flush=True)


@contextmanager
def only_size(ops: CudaOps, tile: decode.Fp8DecodeTile) -> Iterator[None]:
    """The decode kernel in this size alone."""
    usual = decode.SIZES
    try:
        decode.SIZES = {tile.tokens: ((tile.units, tile.stages),)}
        ops.fp8_kernels.restrict(only=["decode"])
        yield
    finally:
        decode.SIZES = usual
        ops.fp8_kernels.restrict()


def measure_quantising(ops: CudaOps) -> None:
    """Rows to e4m3 alone, with the rate at which the one is read and the other written."""
    for rows, k, normed in QUANTISED:
        x, norm = random_tensor(ops, rows, k), random_tensor(ops, k) if normed else None
        scratch = empty((scratch_bytes(rows, k),), uint8, ops.device)
        cells = []
        for scheme, format in SCHEMES.items():
            us = measure(ops.device, [partial(quantized, ops.device, x, norm, 1e-6, format, scratch)] * CALLS)
            cells.append(f"{scheme} {us:.1f} us {3 * rows * k / us / 1e3:.0f} GB/s")
        print(f"quantise {rows} x {k}{' after a norm' if normed else ''}: {', '.join(cells)}", flush=True)


def measure_decode_sizes(ops: CudaOps) -> None:
    """Every size of the decode kernel beside the others, with the quantising."""
    device, format = ops.device, SCHEMES["rows"]
    for k, n in BRIEF_SHAPES:
        copies = max(1, min(CALLS, COLD_BYTES // (k * n)))
        codes = np.random.default_rng(0).integers(0x20, 0x50, k * n, dtype=np.uint8)
        weights = [random_weight(ops, format, n, k, codes) for _ in range(copies)]
        ops.reserve_linear(weights, np.dtype(bfloat16), max(FEW_ROWS))
        for m in FEW_ROWS:
            x, out = random_tensor(ops, m, k), empty((m, n), bfloat16, device)
            calls = [partial(ops.linear, x, weights[i % copies], out=out) for i in range(CALLS)]
            cells = []
            for tile in decode.tiles_of(1 if m == 1 else 8 if m <= 8 else 16, logits=False):
                with only_size(ops, tile):
                    cells.append(f"{tile.units}/{tile.stages} {measure(device, calls):.1f}")
            print(f"decode {m} x {k} x {n}, with quantising, by units/stages: {'  '.join(cells)}", flush=True)


def _all_plans(
    ops: CudaOps,
    problem: Fp8Problem,
    weights: list[LinearWeight],
    x: Tensor,
    out: Tensor,
    rows: tuple[Tensor, Tensor],
) -> list[str]:
    """Times of every plan of wgmma without splits, to fit costs to; with 2 and 4 blocks that share a weight's tiles."""
    cells, choose = [], sm90.choose_plan
    alone = sm90.plans_for(groups=problem.groups, logits=False)
    shared = [replace(plan, sharing=blocks) for plan in alone if sm90.may_share(plan) for blocks in (2, 4)]
    for plan in (*alone, *(shared if problem.num_rows >= MIN_SHARING_ROWS else ())):
        if plan.splits > 1 or problem.num_rows <= plan.tile.m - 64:
            continue
        try:
            sm90.choose_plan = lambda *_, plan=plan, **__: plan
            ops.fp8_kernels.restrict(only=["sm90"])
            calls = [partial(bare, ops, weights[i % len(weights)], x, out, rows) for i in range(CALLS)]
            cells.append(
                f"{plan.tile.warpgroups_m}/{plan.tile.warpgroup_n}/{plan.sharing} {measure(ops.device, calls):.1f}"
            )
        finally:
            sm90.choose_plan = choose
            ops.fp8_kernels.restrict()
    return cells


def measure_layers(ops: CudaOps, scheme: str) -> None:
    """The four products of a layer as the decoder calls them, all in a chain of layers."""
    device, format = ops.device, SCHEMES[scheme]
    for model, (hidden, q_size, qkv_size, inter, chained) in LAYERS.items():
        shapes = ((qkv_size, hidden), (hidden, q_size), (2 * inter, hidden), (hidden, inter))
        codes = np.random.default_rng(1).integers(0x20, 0x50, 1 << 24, dtype=np.uint8)
        layers = [[random_weight(ops, format, n, k, codes) for n, k in shapes] for _ in range(2 * chained)]
        ops.reserve_linear([weight for layer in layers for weight in layer], np.dtype(bfloat16), max(LAYER_ROWS))
        elements = sum(n * k for n, k in shapes)
        for m in LAYER_ROWS:
            norm = random_tensor(ops, hidden)
            stream, normed, qkv = (random_tensor(ops, m, width) for width in (hidden, hidden, qkv_size))
            attended, up, activated = (random_tensor(ops, m, width) for width in (q_size, 2 * inter, inter))
            before, gate, add = RMSNorm(norm, 1e-6, normed), Activate("silu_mul", up), Accumulate()
            chain = [
                call
                for w_qkv, w_out, w_up, w_down in layers
                for call in (
                    partial(ops.linear, stream, w_qkv, prologue=before, out=qkv),
                    partial(ops.linear, attended, w_out, epilogue=add, out=stream),
                    partial(ops.linear, stream, w_up, prologue=before, epilogue=gate, out=activated),
                    partial(ops.linear, activated, w_down, epilogue=add, out=stream),
                )
            ]
            us = measure(device, chain) * 4
            rate = elements / us / 1e3 / READ_GB_S
            print(f"{model} layer's products, {scheme}, {m} rows: {us:.1f} us {rate:.0%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fp8_kernels", description=__doc__)
    parser.add_argument("--scheme", action="append", choices=list(SCHEMES), help="(default: all)")
    parser.add_argument("--plans", action="store_true", help="every plan of wgmma as well")
    parser.add_argument("--no-reference", action="store_true", help="do not time cuBLAS beside")
    parser.add_argument("--layers", action="store_true", help="only the products of whole layers")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="of the products, which alone are measured, of an 8 B layer"
    )
    parser.add_argument("--brief", action="store_true", help="few shapes and rows, and the sizes of few rows' kernel")
    options = parser.parse_args()
    ops = CudaOps(CudaDevice(0))
    reference = None
    if not options.no_reference and not options.layers:
        try:
            reference = ScaledReference()
        except ImportError:
            print("PyTorch is not installed: no figures of cuBLAS beside ours")
    if options.brief:
        measure_quantising(ops)
        measure_decode_sizes(ops)
    brief = options.brief or options.rows
    counts = tuple(options.rows or (BRIEF_ROWS if brief else ROWS))
    for scheme in options.scheme or SCHEMES:
        if not options.rows:
            measure_layers(ops, scheme)
        for k, n in () if options.layers else BRIEF_SHAPES if brief else SHAPES:
            measure_shape(ops, scheme, k, n, counts=counts, plans=options.plans, reference=reference)


if __name__ == "__main__":
    main()
