"""Steps of optimisers."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import Float32, InFloat, Int64, OutFloat, OutUint
from tessera.engine.ops.cuda.types import flat_config
from tessera.engine.ops.training.interface import AdamWStep, TrainingOps
from tessera.engine.ops.training.moment_codes import BLOCK, NUM_CODES, CodedMoment, code_bounds, code_values
from tessera.engine.tensor import Tensor, from_numpy


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


class Adamw8bitParams(NamedTuple):
    weight: OutFloat
    gradient: InFloat
    first_codes: OutUint
    first_scales: OutFloat
    second_codes: OutUint
    second_scales: OutFloat
    tables: InFloat
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
ADAMW_8BIT = KernelSpec("training/adamw.cu", "adamw_8bit_kernel", (), Adamw8bitParams, on_demand=True)
SPECS = (ADAMW, ADAMW_8BIT)
declare_header(
    "training_adamw",
    __name__,
    {"CODE_BLOCK": Constant(BLOCK), "NUM_CODES": Constant(NUM_CODES)},
    params=(AdamwParams, Adamw8bitParams),
)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch, whatever the dtype."""
    return [(ADAMW, ()), (ADAMW_8BIT, ())]


class OptimizerOps(TrainingOps):
    device: CudaDevice

    def _adamw(self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
        params = AdamwParams(
            weight=weight, gradient=gradient, first=first, second=second, size=weight.size, **_numbers(step)
        )
        self.device.launch(ADAMW, (), flat_config(weight.size), params)

    def _adamw_8bit(
        self, weight: Tensor, gradient: Tensor, first: CodedMoment, second: CodedMoment, step: AdamWStep
    ) -> None:
        params = Adamw8bitParams(
            weight=weight,
            gradient=gradient,
            first_codes=first.codes,
            first_scales=first.scales,
            second_codes=second.codes,
            second_scales=second.scales,
            tables=self._code_tables,
            size=weight.size,
            **_numbers(step),
        )
        self.device.launch(ADAMW_8BIT, (), flat_config(weight.size), params)

    @cached_property
    def _code_tables(self) -> Tensor:
        """The kernel's two CodeTable structs, of signed and of unsigned codes."""
        tables = []
        for signed in (True, False):
            bounds = code_bounds(signed=signed)
            tables.append(np.concatenate([code_values(signed=signed), bounds, bounds[-1:]]))
        return from_numpy(np.stack(tables), self.device)


def _numbers(step: AdamWStep) -> dict[str, float]:
    """A step's scalars, by the names of the kernels' parameters."""
    return {
        "gradient_factor": step.gradient_factor,
        "beta1": step.beta1,
        "beta1_rest": 1 - step.beta1,
        "beta2": step.beta2,
        "beta2_rest": 1 - step.beta2,
        "rate": step.learning_rate / (1 - step.beta1**step.step),
        "correction": 1 / math.sqrt(1 - step.beta2**step.step),
        "kept": 1 - step.learning_rate * step.weight_decay,
        "eps": step.eps,
    }
