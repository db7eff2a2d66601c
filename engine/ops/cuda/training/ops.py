"""All training operations on one CUDA device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda import linear
from tessera.engine.ops.cuda.training import flash, instantiations
from tessera.engine.ops.cuda.training.attention import AttentionOps
from tessera.engine.ops.cuda.training.elementwise import ElementwiseOps
from tessera.engine.ops.cuda.training.layer import LayerOps
from tessera.engine.ops.cuda.training.loss import LossOps
from tessera.engine.ops.cuda.training.optimizer import OptimizerOps
from tessera.engine.ops.cuda.training.sums import SumOps
from tessera.engine.ops.cuda.types import cuda_type
from tessera.engine.ops.interface import Ops


class CudaTrainingOps(LossOps, LayerOps, ElementwiseOps, SumOps, AttentionOps, OptimizerOps):
    """See `tessera.engine.ops.training.interface.TrainingOps`.

    Sums are in an order that depends on shapes alone, so that equal inputs give equal bits on equal devices.
    """

    def __init__(self, device: CudaDevice, products: Ops) -> None:
        """`products`: operations on the same device, which multiply."""
        self.device = device
        self.products = products

    def prepare(self, dtype: np.dtype[Any], head_dims: Collection[int]) -> None:
        sizes = {str(head_dim) for head_dim in head_dims}
        name = cuda_type(dtype)
        own = [pair for pair in instantiations((name,)) if pair[0].template != flash.TEMPLATE or pair[1][1] in sizes]
        products = [pair for pair in linear.instantiations((name,)) if not pair[0].batch_invariant]
        self.device.compile([pair for pair in (*own, *products) if pair[0].supports(self.device.arch)])
