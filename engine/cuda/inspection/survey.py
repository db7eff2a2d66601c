"""A survey of the machine's CUDA devices, driver and compiler, for `tessera doctor`.

`python -m tessera.engine.cuda.inspection.survey` prints it as JSON: in a process of its own, because a broken driver
may hang.
"""

from __future__ import annotations

import sys

import msgspec
from cuda.bindings import driver, nvml, nvrtc

from tessera.engine.contract.errors import CompileError, DeviceError
from tessera.engine.cuda.cache import CubinCache, default_cache_dir
from tessera.engine.cuda.compiler import Compiler
from tessera.engine.cuda.driver import FoundDevice, check, compute_capability, device_name, find_device

DEFAULT_ARCH = "90a"  # compiled for where there is no device
PROBE = b'extern "C" __global__ void probe(float *x) { x[threadIdx.x] += 1.0f; }'


class SurveyedDevice(msgspec.Struct, frozen=True):
    """A device; `memory_free` in bytes is None where NVML does not tell."""

    name: str
    compute_capability: tuple[int, int]
    memory: int
    memory_free: int | None
    usable: bool
    reason: str


class Survey(msgspec.Struct, frozen=True):
    """A machine's driver, GPUs and compiler.

    Attributes:
        driver: the driver's own version, such as 580.65.06; None: not known.
        cuda: version of CUDA that the driver supports, such as 13.0; None: no driver.
        usable, reason: of device 0, see `find_device`.
        nvrtc: version of the compiler; None: it is missing or compiles nothing, for `nvrtc_problem`.
    """

    driver: str | None
    cuda: str | None
    usable: bool
    reason: str
    devices: tuple[SurveyedDevice, ...]
    nvrtc: str | None
    nvrtc_problem: str | None


def survey() -> Survey:
    """Makes no context on any device."""
    found = find_device()
    version, cuda = _driver_versions()
    devices = _devices(found) if cuda is not None else ()
    arch = DEFAULT_ARCH
    if devices and devices[0].usable:
        major, minor = devices[0].compute_capability
        arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    compiler, problem = _nvrtc(arch)
    return Survey(version, cuda, found.usable, found.reason, devices, compiler, problem)


def _driver_versions() -> tuple[str | None, str | None]:
    try:
        nvml.init_v2()
        version: str | None = str(nvml.system_get_driver_version())
    except Exception:  # of a library that is missing or refuses
        version = None
    try:
        number = check(driver.cuDriverGetVersion)
    except (DeviceError, RuntimeError):  # RuntimeError: there is no libcuda
        return version, None
    return version, f"{number // 1000}.{number % 1000 // 10}"


def _devices(first: FoundDevice) -> tuple[SurveyedDevice, ...]:
    try:
        count = check(driver.cuDeviceGetCount)
        return tuple(_device(index, first if index == 0 else find_device(index)) for index in range(count))
    except DeviceError:
        return ()


def _device(index: int, found: FoundDevice) -> SurveyedDevice:
    handle = check(driver.cuDeviceGet, index)
    total = int(check(driver.cuDeviceTotalMem, handle))
    return SurveyedDevice(
        device_name(handle), compute_capability(handle), total, _free(index), found.usable, found.reason
    )


def _free(index: int) -> int | None:
    from tessera.engine.cuda.inspection.nvml import watched_device

    try:
        usage = watched_device(index)()
    except Exception:  # as in UsageMonitor: these figures are not known everywhere
        return None
    return usage.memory_total - usage.memory_used


def _nvrtc(arch: str) -> tuple[str | None, str | None]:
    """The compiler's version after a kernel was compiled, or what is wrong with it."""
    try:
        major, minor = Compiler(arch, CubinCache(default_cache_dir())).version
        status, program = nvrtc.nvrtcCreateProgram(PROBE, b"probe.cu", 0, [], [])
        if not status:
            (status,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{arch}".encode()])
            nvrtc.nvrtcDestroyProgram(program)
        if status:
            return None, f"it does not compile for sm_{arch}: {nvrtc.nvrtcGetErrorString(status)[1].decode()}"
    except CompileError as error:
        return None, str(error)
    return f"{major}.{minor}", None


def main() -> int:
    sys.stdout.buffer.write(msgspec.json.encode(survey()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
