"""Backward of norms, activations and softmax; see `tessera.engine.ops.training.interface`."""

from __future__ import annotations

from abc import abstractmethod

from tessera.engine.ops.checks import CheckedOps, require
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32


class LayerTraining(CheckedOps):
    """Letters: T rows, H width of a row, I features of a gated activation."""

    def rmsnorm_gradient(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        weight_gradient: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """dx [T, H] of `rmsnorm`; `weight_gradient` [H] float32 gets the weight's added, where it is given."""
        self._check_norm("rmsnorm_gradient", dy, x, weight, weight_gradient)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._rmsnorm_gradient(dy, x, weight, eps, weight_gradient, out)
        return out

    def layernorm_gradient(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        weight_gradient: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """dx [T, H] of `layernorm`, as `rmsnorm_gradient`; the bias's gradient is `sum_rows(dy)`."""
        self._check_norm("layernorm_gradient", dy, x, weight, weight_gradient)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._layernorm_gradient(dy, x, weight, eps, weight_gradient, out)
        return out

    def silu(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x / (1 + exp(-x)) elementwise (Elfwing et al. 2017)."""
        self._check(x=x, out=out)
        require(x.dtype in FLOAT_DTYPES, "silu", x)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._silu(x, out)
        return out

    def silu_gradient(self, dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        """dx of `silu`."""
        out = self._alike("silu_gradient", dy, x, out)
        if x.size:
            self._silu_gradient(dy, x, out)
        return out

    def gelu_gradient(self, dy: Tensor, x: Tensor, *, tanh: bool, out: Tensor | None = None) -> Tensor:
        """dx of `gelu`."""
        out = self._alike("gelu_gradient", dy, x, out)
        if x.size:
            self._gelu_gradient(dy, x, tanh, out)
        return out

    def silu_mul_gradient(self, dy: Tensor, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """Of `silu_mul`: dy [T, I], gate_up [T, 2 I] -> [T, 2 I], the gate's first."""
        out = self._gated("silu_mul_gradient", dy, gate_up, out)
        if out.size:
            self._silu_mul_gradient(dy, gate_up, out)
        return out

    def gelu_mul_gradient(self, dy: Tensor, gate_up: Tensor, *, tanh: bool, out: Tensor | None = None) -> Tensor:
        """Of `gelu_mul`, as `silu_mul_gradient`."""
        out = self._gated("gelu_mul_gradient", dy, gate_up, out)
        if out.size:
            self._gelu_mul_gradient(dy, gate_up, tanh, out)
        return out

    def softmax_gradient(self, dy: Tensor, y: Tensor, *, log: bool = False, out: Tensor | None = None) -> Tensor:
        """dx [M, N] float32 of `softmax`, or of its logarithm, from its result y [M, N] float32."""
        self._check(dy=dy, y=y, out=out)
        require(y.ndim == 2 and dy.shape == y.shape and dy.dtype == y.dtype == float32, "softmax_gradient", dy, y)
        out = self._out(out, y.shape, float32)
        if y.size:
            self._softmax_gradient(dy, y, log, out)
        return out

    def _check_norm(self, name: str, dy: Tensor, x: Tensor, weight: Tensor, weight_gradient: Tensor | None) -> None:
        self._check(dy=dy, x=x, weight=weight, weight_gradient=weight_gradient)
        fits = x.ndim == 2 and dy.shape == x.shape and weight.shape == x.shape[1:] and x.dtype in FLOAT_DTYPES
        require(fits and dy.dtype == x.dtype == weight.dtype, name, dy, x, weight)
        if weight_gradient is not None:
            fits = weight_gradient.shape == weight.shape and weight_gradient.dtype == float32
            require(fits, f"{name} of the weight", weight_gradient, weight)

    def _alike(self, name: str, dy: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        self._check(dy=dy, x=x, out=out)
        require(dy.shape == x.shape and dy.dtype == x.dtype and x.dtype in FLOAT_DTYPES, name, dy, x)
        return self._out(out, x.shape, x.dtype)

    def _gated(self, name: str, dy: Tensor, gate_up: Tensor, out: Tensor | None) -> Tensor:
        self._check(dy=dy, gate_up=gate_up, out=out)
        fits = dy.ndim == 2 and gate_up.shape == (dy.shape[0], 2 * dy.shape[1])
        require(fits and dy.dtype == gate_up.dtype and dy.dtype in FLOAT_DTYPES, name, dy, gate_up)
        return self._out(out, gate_up.shape, gate_up.dtype)

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _rmsnorm_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, eps: float, weight_gradient: Tensor | None, out: Tensor
    ) -> None: ...
    @abstractmethod
    def _layernorm_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, eps: float, weight_gradient: Tensor | None, out: Tensor
    ) -> None: ...
    @abstractmethod
    def _silu(self, x: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _silu_gradient(self, dy: Tensor, x: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _gelu_gradient(self, dy: Tensor, x: Tensor, tanh: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _silu_mul_gradient(self, dy: Tensor, gate_up: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _gelu_mul_gradient(self, dy: Tensor, gate_up: Tensor, tanh: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _softmax_gradient(self, dy: Tensor, y: Tensor, log: bool, out: Tensor) -> None: ...
