"""The implementation of the operations that belongs to a device."""

from __future__ import annotations

from engine.ops.cpu import CpuOps
from engine.ops.interface import Ops
from engine.tensor import CpuDevice, Device


def make_ops(device: Device) -> Ops:
    """`CpuOps` for the CPU, `CudaOps` for a CUDA device."""
    if isinstance(device, CpuDevice):
        return CpuOps(device)
    # Imported only here, so that a machine without the driver never loads its bindings.
    from engine.cuda.device import CudaDevice
    from engine.ops.cuda import CudaOps

    assert isinstance(device, CudaDevice), f"no operations for {device}"
    return CudaOps(device)
