"""Steps of optimisers; see `tessera.engine.ops.training.interface`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from tessera.engine.ops.checks import CheckedOps, require
from tessera.engine.ops.training.moment_codes import CodedMoment
from tessera.engine.tensor import Tensor, float32


@dataclass(frozen=True)
class AdamWStep:
    """Numbers of one step of AdamW (Loshchilov and Hutter 2019).

    Attributes:
        step: counted from 1, for the correction of the moments' bias.
        gradient_factor: of the gradient before all else: clipping, and the mean over tokens.
        weight_decay: times learning rate and weight, subtracted beside the update.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    gradient_factor: float = 1.0


class OptimizerOps(CheckedOps):
    """All tensors are float32, but for the codes of moments."""

    def adamw(self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
        """m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2, in place in `first` and `second`; weight -=
        learning_rate * (m' / (sqrt(v') + eps) + weight_decay * weight), m' and v' corrected for their start at 0.
        """
        self._check(weight=weight, gradient=gradient, first=first, second=second)
        alike = all(other.shape == weight.shape and other.dtype == float32 for other in (gradient, first, second))
        require(alike and weight.dtype == float32 and step.step >= 1, "adamw", weight, gradient, first, second)
        if weight.size:
            self._adamw(weight, gradient, first, second, step)

    def adamw_8bit(
        self, weight: Tensor, gradient: Tensor, first: CodedMoment, second: CodedMoment, step: AdamWStep
    ) -> None:
        """As `adamw`, with moments that are rounded to codes after each step, and weights updated before that.

        The codes of `first` are signed. A second moment above 0 has a code above it: else its next step could have any
        length.
        """
        self._check(weight=weight, gradient=gradient, **_named(first, "first"), **_named(second, "second"))
        fit = first.fits(weight.size) and second.fits(weight.size) and gradient.shape == weight.shape
        fit = fit and weight.dtype == gradient.dtype == float32 and step.step >= 1
        require(fit, "adamw_8bit", weight, gradient, *first, *second)
        if weight.size:
            self._adamw_8bit(weight, gradient, first, second, step)

    def square_sum(self, x: Tensor, out: Tensor) -> Tensor:
        """out [1] float32 gets the sum of x's squares added."""
        self._check(x=x, out=out)
        require(x.dtype == float32 and out.shape == (1,) and out.dtype == float32, "square_sum", x, out)
        if x.size:
            self._square_sum(x, out)
        return out

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _adamw(self, weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None: ...
    @abstractmethod
    def _adamw_8bit(
        self, weight: Tensor, gradient: Tensor, first: CodedMoment, second: CodedMoment, step: AdamWStep
    ) -> None: ...
    @abstractmethod
    def _square_sum(self, x: Tensor, out: Tensor) -> None: ...


def _named(moment: CodedMoment, name: str) -> dict[str, Tensor]:
    return {f"{name}_codes": moment.codes, f"{name}_scales": moment.scales}
