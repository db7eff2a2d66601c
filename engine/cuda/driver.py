"""The one way the driver is called, and whether there is a device worth calling it for.

`cuda.bindings` imports without a driver on the machine; only a call fails then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cuda.bindings import driver

from tessera.engine.contract.errors import DeviceError, OutOfMemoryError

MIN_DRIVER_VERSION = 13_000  # cubins of CUDA 13's compiler; 1000 * major + 10 * minor
MIN_COMPUTE_CAPABILITY = (8, 0)  # mma.sync on bfloat16, cp.async


class FoundDevice(NamedTuple):
    """Whether a CUDA device can be used, and a sentence that says what it is or why it cannot."""

    usable: bool
    reason: str


def check(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a driver function; returns its result: nothing, a value, or a tuple of values.

    Raises: OutOfMemoryError, or DeviceError with the call and the driver's name and description.
    """
    status, *values = function(*arguments)
    if status:
        raise driver_error(status, function.__name__, arguments)
    return values[0] if len(values) == 1 else tuple(values) or None


def driver_error(status: Any, called: str, arguments: tuple[Any, ...]) -> DeviceError:
    """The exception for a status other than success."""
    name, description = (_text(describe(status)) for describe in (driver.cuGetErrorName, driver.cuGetErrorString))
    kind = OutOfMemoryError if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else DeviceError
    return kind(f"{called}({', '.join(map(_brief, arguments))}) failed with {name}: {description}")


def find_device(index: int = 0) -> FoundDevice:
    """Look for CUDA device `index` without making a context on it."""
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # how cuda.bindings says that the library is not there
        return FoundDevice(False, "no NVIDIA driver is installed (libcuda was not found)")
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return FoundDevice(False, "the NVIDIA driver sees no CUDA device")
    if status:
        return FoundDevice(False, f"the NVIDIA driver does not start: {driver_error(status, 'cuInit', (0,))}")
    try:
        return _examine(index)
    except DeviceError as error:
        return FoundDevice(False, f"CUDA device {index} does not answer: {error}")


def open_context(index: int = 0) -> None:
    """Make the primary context of CUDA device `index`, if that can be used, and keep it for good."""
    if find_device(index).usable:
        check(driver.cuDevicePrimaryCtxRetain, check(driver.cuDeviceGet, index))


def _examine(index: int) -> FoundDevice:
    version = check(driver.cuDriverGetVersion)
    if version < MIN_DRIVER_VERSION:
        return FoundDevice(
            False,
            f"the NVIDIA driver supports CUDA {_version(version)}, "
            f"but CUDA {_version(MIN_DRIVER_VERSION)} (driver 580) or newer is needed",
        )
    count = check(driver.cuDeviceGetCount)
    if not 0 <= index < count:
        return FoundDevice(False, f"there is no CUDA device {index}; this machine has {count}, numbered from 0")
    handle = check(driver.cuDeviceGet, index)
    name = device_name(handle)
    capability = compute_capability(handle)
    if capability < MIN_COMPUTE_CAPABILITY:
        return FoundDevice(
            False,
            f"{name} has compute capability {capability[0]}.{capability[1]}, "
            f"but {MIN_COMPUTE_CAPABILITY[0]}.{MIN_COMPUTE_CAPABILITY[1]} or newer is needed",
        )
    total = check(driver.cuDeviceTotalMem, handle)
    return FoundDevice(
        True, f"{name} (compute capability {capability[0]}.{capability[1]}, {total / 2**30:.1f} GiB of memory)"
    )


def sees_memory(index: int, other: int) -> bool:
    """Whether kernels of one device may read and write another's memory. Raises: DeviceError."""
    return bool(check(driver.cuDeviceCanAccessPeer, check(driver.cuDeviceGet, index), check(driver.cuDeviceGet, other)))


def device_name(handle: Any) -> str:
    """Such as `NVIDIA H200`."""
    return str(check(driver.cuDeviceGetName, 128, handle).split(b"\0")[0].decode())


def device_attribute(handle: Any, name: str) -> int:
    """`name` without its prefix, for example `MULTIPROCESSOR_COUNT`."""
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(driver.cuDeviceGetAttribute, attribute, handle))


def compute_capability(handle: Any) -> tuple[int, int]:
    return (
        device_attribute(handle, "COMPUTE_CAPABILITY_MAJOR"),
        device_attribute(handle, "COMPUTE_CAPABILITY_MINOR"),
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _text(result: tuple[Any, bytes | None]) -> str:
    return (result[1] or b"an unknown error").decode()


def _brief(argument: Any) -> str:
    text = repr(argument)
    return text if len(text) <= 80 else f"{text[:77]}..."
