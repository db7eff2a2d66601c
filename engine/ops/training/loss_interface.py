"""The loss of a language model; see `tessera.engine.ops.training.interface`."""

from __future__ import annotations

from abc import abstractmethod

from tessera.engine.ops.checks import CheckedOps, require
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32, int32


class LossTraining(CheckedOps):
    """Letters: T tokens, H hidden size, V vocabulary."""

    def linear_cross_entropy(
        self, x: Tensor, weight: Tensor, targets: Tensor, *, multiplier: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """-log softmax(multiplier * x weight^T)[target] of each token, the vocabulary in chunks.

        x [T, H], weight [V, H], targets [T] int32; a target outside 0..V-1 has the loss 0. -> losses [T] float32, and
        the logarithm of the sum of each token's exponentials, [T] float32. No logits [T, V] are kept.
        """
        self._check_loss(x, weight, targets)
        losses, logsumexp = (self._out(None, targets.shape, float32) for _ in range(2))
        if x.size:
            self._linear_cross_entropy(x, weight, targets, multiplier, losses, logsumexp)
        return losses, logsumexp

    def linear_cross_entropy_and_gradient(
        self,
        factors: Tensor,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        multiplier: float = 1.0,
        weight_gradient: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """losses of `linear_cross_entropy`, and dx of `linear_cross_entropy_gradient`, from the same logits."""
        self._check_loss(x, weight, targets)
        self._check_factors(factors, weight, targets, weight_gradient)
        losses, logsumexp = (self._out(None, targets.shape, float32) for _ in range(2))
        out = self._out(None, x.shape, x.dtype)
        if x.size:
            self._linear_cross_entropy_gradient(
                factors, x, weight, targets, multiplier, losses, logsumexp, weight_gradient, out
            )
        return losses, out

    def linear_cross_entropy_gradient(
        self,
        factors: Tensor,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        logsumexp: Tensor,
        *,
        multiplier: float = 1.0,
        weight_gradient: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """dx [T, H] of the losses' sum, each times its factor in factors [T] float32.

        `weight_gradient` [V, H] float32 gets the weight's gradient added, where it is given.
        """
        self._check_loss(x, weight, targets)
        self._check_factors(factors, weight, targets, weight_gradient)
        self._check(logsumexp=logsumexp, out=out)
        fits = logsumexp.shape == targets.shape and logsumexp.dtype == float32
        require(fits, "linear_cross_entropy_gradient", logsumexp, targets)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._linear_cross_entropy_gradient(
                factors, x, weight, targets, multiplier, None, logsumexp, weight_gradient, out
            )
        return out

    def _check_loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> None:
        self._check(x=x, weight=weight, targets=targets)
        fits = x.ndim == 2 and weight.ndim == 2 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype
        require(fits and x.dtype in FLOAT_DTYPES, "linear_cross_entropy", x, weight)
        require(targets.shape == x.shape[:1] and targets.dtype == int32, "targets", targets, x)

    def _check_factors(self, factors: Tensor, weight: Tensor, targets: Tensor, weight_gradient: Tensor | None) -> None:
        self._check(factors=factors, weight_gradient=weight_gradient)
        fits = factors.shape == targets.shape and factors.dtype == float32
        require(fits, "linear_cross_entropy_gradient", factors, targets)
        if weight_gradient is not None:
            fits = weight_gradient.shape == weight.shape and weight_gradient.dtype == float32
            require(fits, "linear_cross_entropy_gradient of the weight", weight_gradient, weight)

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _linear_cross_entropy(
        self, x: Tensor, weight: Tensor, targets: Tensor, multiplier: float, losses: Tensor, logsumexp: Tensor
    ) -> None: ...
    @abstractmethod
    def _linear_cross_entropy_gradient(
        self,
        factors: Tensor,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        multiplier: float,
        losses: Tensor | None,
        logsumexp: Tensor,
        weight_gradient: Tensor | None,
        out: Tensor,
    ) -> None:
        """With `losses` it computes these and `logsumexp` as well; without, `logsumexp` is known."""
