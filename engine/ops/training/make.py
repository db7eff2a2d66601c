"""The implementation of the training operations that belongs to a device."""

from __future__ import annotations

from tessera.engine.contract.errors import ConfigError
from tessera.engine.ops.training.cpu import CpuTrainingOps
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import CpuDevice, Device


def make_training_ops(device: Device) -> TrainingOps:
    """Raises: ConfigError where a device has no such operations."""
    if isinstance(device, CpuDevice):
        return CpuTrainingOps(device)
    raise ConfigError(f"training on {device} is not supported: the backward operations are there for the CPU alone")
