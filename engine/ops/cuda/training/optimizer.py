"""Steps of optimisers."""

from __future__ import annotations

import math
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import Float32, InFloat, Int64, OutFloat
from tessera.engine.ops.cuda.types import flat_config
from tessera.engine.ops.training.interface import AdamWStep, TrainingOps
from tessera.engine.tensor import Tensor


class AdamwParams(NamedTuple):
    weight: OutFloat
    gradient: InFloat
    first: OutFloat
    second: OutFloat
    size: Int64
    gradient_factor: Float32
    beta1: Float32
    beta1_rest: Float32
    beta2: Float32
    beta2_rest: Float32
    rate: Float32
    correction: Float32
    kept: Float32
    eps: Float32


ADAMW = KernelSpec("training/adamw.cu", "adamw_kernel", (), AdamwParams, on_demand=True)
SPECS = (ADAMW,)
declare_header("training_adamw", __name__, params=(AdamwParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch, whatever the dtype."""
    return [(ADAMW, ())]


class OptimizerOps(TrainingOps):
    device: CudaDevice

    def _adamw(self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
        params = AdamwParams(
            weight=weight,
            gradient=gradient,
            first=first,
            second=second,
            size=weight.size,
            gradient_factor=step.gradient_factor,
            beta1=step.beta1,
            beta1_rest=1 - step.beta1,
            beta2=step.beta2,
            beta2_rest=1 - step.beta2,
            rate=step.learning_rate / (1 - step.beta1**step.step),
            correction=1 / math.sqrt(1 - step.beta2**step.step),
            kept=1 - step.learning_rate * step.weight_decay,
            eps=step.eps,
        )
        self.device.launch(ADAMW, (), flat_config(weight.size), params)
