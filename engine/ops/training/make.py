"""The implementation of the training operations that belongs to a device."""

from __future__ import annotations

from tessera.engine.ops.interface import Ops
from tessera.engine.ops.training.cpu import CpuTrainingOps
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import CpuDevice


def make_training_ops(ops: Ops) -> TrainingOps:
    """Beside `ops`, on their device."""
    device = ops.device
    if isinstance(device, CpuDevice):
        return CpuTrainingOps(device)
    # Imported only here, so that a machine without the driver never loads its bindings.
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ops.cuda.training.ops import CudaTrainingOps

    assert isinstance(device, CudaDevice), f"no training operations for {device}"
    return CudaTrainingOps(device, ops)
