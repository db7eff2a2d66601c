"""All training operations on one CUDA device."""

from __future__ import annotations

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda.training.attention import AttentionOps
from tessera.engine.ops.cuda.training.elementwise import ElementwiseOps
from tessera.engine.ops.cuda.training.layer import LayerOps
from tessera.engine.ops.cuda.training.loss import LossOps
from tessera.engine.ops.cuda.training.optimizer import OptimizerOps
from tessera.engine.ops.cuda.training.sums import SumOps
from tessera.engine.ops.interface import Ops


class CudaTrainingOps(LossOps, LayerOps, ElementwiseOps, SumOps, AttentionOps, OptimizerOps):
    """See `tessera.engine.ops.training.interface.TrainingOps`.

    Sums are in an order that depends on shapes alone, so that equal inputs give equal bits on equal devices.
    """

    def __init__(self, device: CudaDevice, products: Ops) -> None:
        """`products`: operations on the same device, which multiply."""
        self.device = device
        self.products = products
