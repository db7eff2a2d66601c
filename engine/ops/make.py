"""The implementation of the operations that belongs to a device."""

from __future__ import annotations

from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import CpuDevice, Device


def make_ops(device: Device, *, batch_invariant: bool = False) -> Ops:
    """`CpuOps` for the CPU, `CudaOps` for a CUDA device, which alone can be `batch_invariant`."""
    if isinstance(device, CpuDevice):
        return CpuOps(device)
    # Imported only here, so that a machine without the driver never loads its bindings.
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ops.cuda import CudaOps

    assert isinstance(device, CudaDevice), f"no operations for {device}"
    return CudaOps(device, batch_invariant=batch_invariant)
