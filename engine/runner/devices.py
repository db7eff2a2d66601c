"""Which device an engine runs on."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from tessera.engine.contract.config import DeviceName
from tessera.engine.contract.errors import ConfigError
from tessera.engine.tensor import CPU, Device

logger = logging.getLogger("tessera.engine")

NO_PACKAGES = "the packages for it are not installed: pip install 'tessera-llm[cuda]'"
DRIVER_DEVICE = Path("/dev/nvidiactl")  # there wherever NVIDIA's driver is loaded, in containers with a GPU as well


def select_device(name: DeviceName) -> tuple[Device, str]:
    """The device, and a sentence that says why it is this one.

    `auto` takes CUDA where a usable device is found, else the CPU. Raises: ConfigError where `cuda`
    was asked for and there is none.
    """
    if name == "cpu":
        return CPU, "the CPU was asked for"
    if not has_cuda_packages():
        if name == "cuda":
            raise ConfigError(f"--device cuda cannot be used: {NO_PACKAGES}")
        if DRIVER_DEVICE.exists():
            logger.warning("this machine has an NVIDIA GPU, which is not used: %s", NO_PACKAGES)
            return CPU, f"the GPU is not used: {NO_PACKAGES}"
        return CPU, "the packages for a GPU, tessera-llm[cuda], are not installed"
    # Imported only here: a machine that serves on the CPU never loads the driver's bindings.
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.cuda.driver import find_device

    found = find_device()
    if found.usable:
        asked = "asked for" if name == "cuda" else "found"
        return CudaDevice(), f"a usable CUDA device was {asked}: {found.reason}"
    if name == "cuda":
        raise ConfigError(f"--device cuda cannot be used: {found.reason}; --device cpu needs no GPU")
    return CPU, f"no usable CUDA device: {found.reason}"


def device_description(device: Device) -> str:
    """ "the CPU", or the GPU's name."""
    return "the CPU" if device is CPU else str(getattr(device, "device_name", device.name))


def free_memory(device: Device) -> int | None:
    """Bytes that a CUDA device could still hand out; None for the CPU."""
    if device is CPU:
        return None
    from tessera.engine.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice)
    return device.free_memory()


def has_cuda_packages() -> bool:
    """Whether the driver's bindings are installed: they come with the extra `cuda`."""
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False
