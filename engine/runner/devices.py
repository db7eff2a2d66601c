"""Which device an engine runs on."""

from __future__ import annotations

from tessera.engine.contract.config import DeviceName
from tessera.engine.contract.errors import ConfigError
from tessera.engine.tensor import CPU, Device


def select_device(name: DeviceName) -> tuple[Device, str]:
    """The device, and a sentence that says why it is this one.

    `auto` takes CUDA where a usable device is found, else the CPU. Raises: ConfigError where `cuda`
    was asked for and there is none.
    """
    if name == "cpu":
        return CPU, "the CPU was asked for"
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
