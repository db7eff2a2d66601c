"""Kernels under a tool, which takes long to change the code of each that a process loads.

As a program, compile those that GPU tests compile beforehand, one by one, so that they are in the cache. As a pytest
plugin, have tests and the engines in them load a kernel when they first launch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tessera.engine.cuda import compiler
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.ops.cuda import CudaOps
from tests.support.cases.op_cases import DTYPES
from tests.support.kernel_macro import define_kernel_macro

Progress = Callable[[int, int], None]


def pytest_configure(config: pytest.Config) -> None:
    compile_all = CudaDevice.compile

    def compile_as_used(
        self: CudaDevice, instantiations: Sequence[Instantiation], progress: Progress | None = None
    ) -> None:
        if len(instantiations) == 1 or progress is not None:
            compile_all(self, instantiations, progress)

    def compile_nothing(*arguments: Any, **options: Any) -> None:
        pass

    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setattr(CudaDevice, "compile", compile_as_used)
    patch.setattr(CudaOps, "compile", compile_nothing)


def main() -> None:
    compiler.NAMES_PER_PROGRAM = 1
    define_kernel_macro()
    ops = CudaOps(CudaDevice(0))
    for dtype in DTYPES:
        ops.compile(dtype)


if __name__ == "__main__":
    main()
