"""The training operations in NumPy: the reference for kernels, and what trains small models without a GPU.

Public: `CpuTrainingOps`.
"""

from __future__ import annotations

from tessera.engine.ops.training.cpu.attention import CpuAttentionTraining
from tessera.engine.ops.training.cpu.elementwise import CpuElementwiseTraining
from tessera.engine.ops.training.cpu.layer import CpuLayerTraining
from tessera.engine.ops.training.cpu.linear import CpuLinearTraining
from tessera.engine.ops.training.cpu.loss import CpuLossTraining
from tessera.engine.ops.training.cpu.optimizer import CpuOptimizerOps
from tessera.engine.tensor import CPU, CpuDevice


class CpuTrainingOps(
    CpuLinearTraining,
    CpuLayerTraining,
    CpuElementwiseTraining,
    CpuAttentionTraining,
    CpuLossTraining,
    CpuOptimizerOps,
):
    """Computes in float32 whatever the dtype, and rounds once at the output."""

    def __init__(self, device: CpuDevice = CPU) -> None:
        self.device = device
