"""The operations of training, as one interface that a device implements.

As in `tessera.engine.ops.interface`, public methods check shapes, dtypes and devices, make `out` where none is given,
and call the implementation's method with an underscore. Sums run in float32 whatever the dtype. A gradient of
activations has their dtype; a gradient of weights is float32, and with `accumulate` it is added to what `out` holds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from tessera.engine.ops.training.attention_interface import AttentionTraining, PackedSequences
from tessera.engine.ops.training.elementwise_interface import ElementwiseTraining
from tessera.engine.ops.training.layer_interface import LayerTraining
from tessera.engine.ops.training.linear_interface import LinearTraining
from tessera.engine.ops.training.loss_interface import LossTraining
from tessera.engine.ops.training.optimizer_interface import AdamWStep, OptimizerOps

__all__ = ["AdamWStep", "PackedSequences", "TrainingOps"]


class TrainingOps(LinearTraining, LayerTraining, ElementwiseTraining, AttentionTraining, LossTraining, OptimizerOps):
    """See the module's description."""

    def prepare(self, dtype: np.dtype[Any], head_dims: Collection[int]) -> None:
        """Compile beforehand what a model in `dtype` with heads of these sizes launches, so that no step waits for it.

        Raises: CompileError.
        """
