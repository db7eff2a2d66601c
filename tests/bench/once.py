"""Each product of a layer of Llama-3.1-8B once, for NVIDIA's profiler, which runs each kernel some forty times:

    ncu -k 'regex:block|fp8' --set full --clock-control none -o found python -m tests.bench.once Q4_K:16:qogd fp8:16:gd
    ncu -i found.ncu-rep --page raw --csv | python -m tests.bench.ncu
    ncu -i found.ncu-rep --page source --csv | python -m tests.bench.ncu --source 2

A step of a whole model takes it minutes, as it keeps a copy of all memory.
"""

from __future__ import annotations

import argparse

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import KERNEL_FORMATS, Fp8Format, LinearWeight
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.linear_interface import Accumulate, Activate, RMSNorm
from tessera.engine.tensor import bfloat16
from tests.bench.block_kernels import HIDDEN, INTER, QK, V, random_part
from tests.bench.fp8_kernels import random_weight
from tests.bench.kernels import random_tensor

QKV = QK + V
SHAPES = {"q": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "g": (2 * INTER, HIDDEN), "d": (HIDDEN, INTER)}


def run(ops: CudaOps, kind: str, rows: int, which: str) -> None:
    """The products named in `which`, by weights of random bits: a kernel type of packed formats, or fp8."""
    weights = {name: _weight(ops, kind, *SHAPES[name]) for name in which}
    ops.reserve_linear(list(weights.values()), np.dtype(bfloat16), rows)
    residual, attended, normed, qkv, up, between = (
        random_tensor(ops, rows, width) for width in (HIDDEN, HIDDEN, HIDDEN, QKV, 2 * INTER, INTER)
    )
    norm, gate = RMSNorm(random_tensor(ops, HIDDEN), 1e-6, normed), Activate("silu_mul", up)
    for name, weight in weights.items():
        if name == "q":
            ops.linear(residual, weight, prologue=norm, out=qkv)
        elif name == "o":
            ops.linear(attended, weight, epilogue=Accumulate(), out=residual)
        elif name == "g":
            ops.linear(residual, weight, prologue=norm, epilogue=gate, out=between)
        else:
            ops.linear(between, weight, epilogue=Accumulate(), out=residual)
    ops.device.synchronize()


def _weight(ops: CudaOps, kind: str, features: int, in_features: int) -> LinearWeight:
    rng = np.random.default_rng(0)
    if kind == "fp8":
        codes = rng.integers(0x20, 0x50, 1 << 20, dtype=np.uint8)
        return random_weight(ops, Fp8Format(), features, in_features, codes)
    bits = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    return LinearWeight((random_part(ops, KERNEL_FORMATS[kind], features, in_features, bits),))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.once", description=__doc__)
    parser.add_argument(
        "products", nargs="+", metavar="FORMAT:ROWS:WHICH", help="WHICH: of q, o, g and d, as in Q4_K:16:qogd"
    )
    ops = CudaOps(CudaDevice())
    for product in parser.parse_args().products:
        kind, rows, which = product.split(":")
        run(ops, kind, int(rows), which)


if __name__ == "__main__":
    main()
