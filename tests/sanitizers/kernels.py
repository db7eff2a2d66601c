"""Compile each kernel that GPU tests compile beforehand, by itself, as one that is compiled when it is used.

They are then in the cache, where the processes under a tool find them.
"""

from __future__ import annotations

import os

from tessera.engine.cuda import compiler
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda import CudaOps
from tests.support.cases.op_cases import DTYPES


def main() -> None:
    compiler.NAMES_PER_PROGRAM = 1
    if macro := os.environ.get("KERNEL_MACRO"):
        compiler.OPTIONS += (f"-D{macro}",)
    ops = CudaOps(CudaDevice(0))
    for dtype in DTYPES:
        ops.compile(dtype)


if __name__ == "__main__":
    main()
