"""The devices and operations of the GPU tests; without a GPU they are skipped, saying why.

With TESSERA_EMULATED=1 the kernels run on the CPU (`tests/emulation`), as on sm_90a, or on what EMULATED_ARCH says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from typing import TYPE_CHECKING, Protocol

import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.cuda.driver import find_device
from tessera.engine.ops.cpu import CpuOps
from tests.gpu.lost_device import pytest_runtest_makereport, pytest_runtest_setup  # noqa: F401 (hooks)
from tests.support.cases.op_cases import DTYPES
from tests.support.kernel_macro import define_kernel_macro

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ops.cuda import CudaOps


def pytest_configure(config: pytest.Config) -> None:
    """Where there are several GPUs, each of pytest-xdist's workers has another one as its device 0."""
    define_kernel_macro()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if worker.startswith("gw") and len(gpus) > 1:
        first = int(worker[2:]) % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


@pytest.fixture(scope="session")
def cuda_device(pytestconfig: pytest.Config) -> Iterator[CudaDevice]:
    """Device 0. With TESSERA_REQUIRE_GPU=1 its absence is a failure."""
    if os.environ.get("TESSERA_EMULATED") == "1":
        from tests.emulation.device import EmulatedDevice, kernel_folder
        from tests.emulation.tensor_maps import emulated_tensor_maps

        with emulated_tensor_maps():
            arch = os.environ.get("EMULATED_ARCH", "90a")
            yield EmulatedDevice(kernel_folder(pytestconfig), arch=arch)  # type: ignore[misc]
        return
    found = find_device(0)
    if not found.usable:
        if os.environ.get("TESSERA_REQUIRE_GPU") == "1":
            pytest.fail(f"TESSERA_REQUIRE_GPU=1, but {found.reason}", pytrace=False)
        pytest.skip(found.reason)
    from tessera.engine.cuda.device import CudaDevice

    yield CudaDevice(0)


@pytest.fixture(scope="session")
def cuda_ops(cuda_device: CudaDevice) -> CudaOps:
    """All kernels compiled beforehand, which is many at a time."""
    from tessera.engine.ops.cuda import CudaOps

    ops = CudaOps(cuda_device)
    for dtype in DTYPES:
        ops.compile(dtype)
    return ops


@pytest.fixture(scope="session")
def training(cuda_device: CudaDevice) -> Functions:
    """Operations with a backward; kernels are compiled when they are first launched."""
    from tessera.engine.ops.cuda import CudaOps
    from tessera.engine.ops.cuda.training.ops import CudaTrainingOps

    ops = CudaOps(cuda_device)
    return Functions(ops, CudaTrainingOps(cuda_device, ops))


@pytest.fixture(scope="session")
def cpu_ops() -> CpuOps:
    return CpuOps()


class NoTransfers(Protocol):
    def __call__(self) -> AbstractContextManager[None]: ...


@pytest.fixture
def no_transfers(cuda_device: CudaDevice) -> NoTransfers:
    """`with no_transfers():` fails if anything inside copies between host and device."""

    @contextmanager
    def watch() -> Iterator[None]:
        before = astuple(cuda_device.transfers)
        yield
        assert astuple(cuda_device.transfers) == before, "an operation copied between host and device"

    return watch
