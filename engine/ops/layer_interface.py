"""Norms and activations; see `tessera.engine.ops.interface`."""

from __future__ import annotations

from abc import abstractmethod

from tessera.engine.ops.checks import CheckedOps
from tessera.engine.ops.checks import require as _require
from tessera.engine.tensor import Tensor

# Of the clamped SwiGLU, as gpt-oss was trained.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


class LayerOps(CheckedOps):
    """Letters: T rows, H width of a row, I features of a gated activation."""

    # -- norms ----------------------------------------------------------------------------------

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight per row of x [T, H] (Zhang and Sennrich 2019)."""
        self._check(x=x, weight=weight, out=out)
        _require(x.ndim == 2 and weight.shape == x.shape[1:] and weight.dtype == x.dtype, "rmsnorm", x, weight)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._rmsnorm(x, weight, eps, out)
        return out

    def rmsnorm_add(
        self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor, stream: Tensor | None = None
    ) -> Tensor:
        """out [T, H] = stream + rmsnorm(x, weight, eps), which is rounded to the dtype first; `out` is not x.

        stream [T, H]: by default what `out` holds.
        """
        stream = out if stream is None else stream
        self._check(x=x, weight=weight, stream=stream, out=out)
        _require(x.ndim == 2 and weight.shape == x.shape[1:] and weight.dtype == x.dtype, "rmsnorm_add", x, weight)
        _require(out.shape == x.shape and out.dtype == x.dtype, "rmsnorm_add out", x, out)
        _require(stream.shape == x.shape and stream.dtype == x.dtype, "rmsnorm_add stream", x, stream)
        if x.size:
            self._rmsnorm_add(x, weight, eps, stream, out)
        return out

    def layernorm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
    ) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias per row of x [T, H] (Ba et al. 2016)."""
        self._check(x=x, weight=weight, bias=bias, out=out)
        _require(x.ndim == 2 and weight.shape == x.shape[1:] and weight.dtype == x.dtype, "layernorm", x, weight)
        if bias is not None:
            _require(bias.shape == weight.shape and bias.dtype == x.dtype, "layernorm bias", bias, weight)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._layernorm(x, weight, bias, eps, out)
        return out

    def norm_columns(
        self, x: Tensor, weight: Tensor, eps: float, *, first: int = 0, groups: int = 1, centred: bool = False
    ) -> Tensor:
        """Norm of some columns of each row of x [T, W], in place; x is returned.

        weight [N]: of the columns first .. first + N - 1, which are `groups` vectors of N / groups. Each passes an
        RMSNorm, or `centred` a LayerNorm without a bias.
        """
        self._check(x=x, weight=weight)
        fits = x.ndim == 2 and weight.ndim == 1 and first >= 0 and first + weight.shape[0] <= x.shape[1]
        _require(fits and weight.dtype == x.dtype and groups > 0, "norm_columns", x, weight)
        _require(weight.shape[0] % groups == 0, "norm_columns", x, weight)
        if x.size and weight.size:
            self._norm_columns(x, weight, eps, first, groups, centred)
        return x

    # -- activations ----------------------------------------------------------------------------

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """silu(gate) * up; gate_up [T, 2 I] with the gate first -> [T, I] (Shazeer 2020)."""
        self._check(gate_up=gate_up, out=out)
        _require(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "silu_mul", gate_up)
        out = self._out(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        if out.size:
            self._silu_mul(gate_up, out)
        return out

    def clamped_swiglu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """(up + 1) * gate * sigmoid(SWIGLU_ALPHA * gate), the gate at most SWIGLU_LIMIT and up within it (gpt-oss).

        gate_up [T, 2 I] with the gate first -> [T, I].
        """
        self._check(gate_up=gate_up, out=out)
        _require(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "clamped_swiglu_mul", gate_up)
        out = self._out(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        if out.size:
            self._clamped_swiglu_mul(gate_up, out)
        return out

    def gelu_mul(self, gate_up: Tensor, *, tanh: bool, out: Tensor | None = None) -> Tensor:
        """gelu(gate) * up; gate_up [T, 2 I] with the gate first -> [T, I] (Shazeer 2020); `tanh` as for `gelu`."""
        self._check(gate_up=gate_up, out=out)
        _require(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "gelu_mul", gate_up)
        out = self._out(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        if out.size:
            self._gelu_mul(gate_up, tanh, out)
        return out

    def gelu(self, x: Tensor, *, tanh: bool, out: Tensor | None = None) -> Tensor:
        """GELU elementwise (Hendrycks and Gimpel 2016): the tanh approximation or the exact erf form."""
        self._check(x=x, out=out)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._gelu(x, tanh, out)
        return out

    def relu(self, x: Tensor, *, squared: bool, out: Tensor | None = None) -> Tensor:
        """max(x, 0) elementwise, or its square (So et al. 2021)."""
        self._check(x=x, out=out)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._relu(x, squared, out)
        return out

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...

    @abstractmethod
    def _rmsnorm_add(self, x: Tensor, weight: Tensor, eps: float, stream: Tensor, out: Tensor) -> None: ...

    @abstractmethod
    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None: ...
    @abstractmethod
    def _silu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _clamped_swiglu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _gelu_mul(self, gate_up: Tensor, tanh: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _gelu(self, x: Tensor, tanh: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _relu(self, x: Tensor, squared: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _norm_columns(self, x: Tensor, weight: Tensor, eps: float, first: int, groups: int, centred: bool) -> None: ...
