"""Which variants of the kernels a run of the GPU tests launched: `pytest -p tests.gpu.launched -m gpu`.

A shape that is too narrow, or a faster kernel in front, leaves a variant without a test, and nothing else shows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import tests.support.processes.single_blas_thread  # noqa: F401 (it must come before NumPy)
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import KernelSpec
from tessera.engine.ops.cuda.registry import all_instantiations
from tessera.engine.ops.cuda.types import C_TYPE_NAMES

KEY = "launched"
launched: set[str] = set()
archs: set[str] = set()


def pytest_configure() -> None:
    launch = CudaDevice.launch

    def noting(self: CudaDevice, spec: KernelSpec[Any], template: tuple[str, ...], *rest: Any) -> None:
        launched.add(spec.instantiation(template))
        archs.add(self.arch)
        launch(self, spec, template, *rest)

    setattr(CudaDevice, "launch", noting)  # noqa: B010 (an assignment of another type)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a process of pytest-xdist, whose parent reports
        output[KEY] = sorted(launched), sorted(archs)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    names, of = getattr(node, "workeroutput", {}).get(KEY, ((), ()))
    launched.update(names)
    archs.update(of)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for arch in sorted(archs):
        every = variants(arch)
        missing = [name for name in every if name not in launched]
        terminalreporter.section(f"{len(every) - len(missing)} of {len(every)} kernel variants for sm_{arch} launched")
        for name in missing:
            terminalreporter.line(f"not launched: {name}")


def variants(arch: str) -> Sequence[str]:
    """All that the operations can launch there, for elements of all types."""
    pairs = [pair for dtype in C_TYPE_NAMES.values() for pair in all_instantiations((dtype,))]
    return sorted({spec.instantiation(template) for spec, template in pairs if spec.supports(arch)})
