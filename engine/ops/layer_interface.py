"""The operations of a layer's halves: norms, products, activations; see `tessera.engine.ops.interface`."""

from __future__ import annotations

from abc import abstractmethod

from tessera.engine.ops.checks import CheckedOps
from tessera.engine.ops.checks import require as _require
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32


class LayerOps(CheckedOps):
    """Letters: M or T rows, K or H width of a row, N features, I features of a gated activation."""

    # -- linear ---------------------------------------------------------------------------------

    def matmul(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        *,
        accumulate: bool = False,
    ) -> Tensor:
        """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N].

        The result has x's dtype, or float32 if `out` says so (logits). With `accumulate` it is added to
        what `out` holds (a residual stream), and rounded once.
        """
        self._check(x=x, weight=weight, bias=bias, out=out)
        self._require_product("matmul", x, weight, bias)
        _require(out is not None or not accumulate, "matmul that accumulates needs out", x, weight)
        out = self._out(out, (x.shape[0], weight.shape[0]), x.dtype, also=float32)
        if out.size:
            self._matmul(x, weight, bias, out, accumulate)
        return out

    def matmul_silu_mul(self, x: Tensor, weight: Tensor, *, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """silu(gate) * up of the product x [M, K] times weight [2 I, K] transposed -> [M, I].

        The gate's rows come first in `weight`. `gate_up` [M, 2 I] is scratch: what it holds afterwards
        is undefined.
        """
        self._check(x=x, weight=weight, gate_up=gate_up, out=out)
        self._require_product("matmul_silu_mul", x, weight, None)
        _require(weight.shape[0] % 2 == 0, "matmul_silu_mul", x, weight)
        _require(gate_up.shape == (x.shape[0], weight.shape[0]) and gate_up.dtype == x.dtype, "gate_up", gate_up, x)
        out = self._out(out, (x.shape[0], weight.shape[0] // 2), x.dtype)
        if out.size:
            self._matmul_silu_mul(x, weight, gate_up, out)
        return out

    def rmsnorm_matmul(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        normed: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """`matmul` of `rmsnorm(x, norm, eps)`; x [M, K], norm [K], `normed` [M, K] scratch."""
        self._check(x=x, norm=norm, weight=weight, bias=bias, normed=normed, out=out)
        self._require_product("rmsnorm_matmul", x, weight, bias)
        self._require_norm("rmsnorm_matmul", x, norm, normed)
        out = self._out(out, (x.shape[0], weight.shape[0]), x.dtype, also=float32)
        if out.size:
            self._rmsnorm_matmul(x, norm, eps, weight, bias, normed, out)
        return out

    def rmsnorm_matmul_silu_mul(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        *,
        normed: Tensor,
        gate_up: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """`matmul_silu_mul` of `rmsnorm(x, norm, eps)`; `normed` [M, K] and `gate_up` [M, 2 I] are scratch."""
        self._check(x=x, norm=norm, weight=weight, normed=normed, gate_up=gate_up, out=out)
        self._require_product("rmsnorm_matmul_silu_mul", x, weight, None)
        self._require_norm("rmsnorm_matmul_silu_mul", x, norm, normed)
        _require(weight.shape[0] % 2 == 0, "rmsnorm_matmul_silu_mul", x, weight)
        _require(gate_up.shape == (x.shape[0], weight.shape[0]) and gate_up.dtype == x.dtype, "gate_up", gate_up, x)
        out = self._out(out, (x.shape[0], weight.shape[0] // 2), x.dtype)
        if out.size:
            self._rmsnorm_matmul_silu_mul(x, norm, eps, weight, normed, gate_up, out)
        return out

    def _require_product(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        _require(x.ndim == 2 and weight.ndim == 2 and x.shape[1] == weight.shape[1], name, x, weight)
        _require(x.dtype == weight.dtype and x.dtype in FLOAT_DTYPES, name, x, weight)
        if bias is not None:
            _require(bias.shape == (weight.shape[0],) and bias.dtype == x.dtype, f"{name} bias", bias, weight)

    def _require_norm(self, name: str, x: Tensor, norm: Tensor, normed: Tensor) -> None:
        _require(norm.shape == x.shape[1:] and norm.dtype == x.dtype, f"{name} norm", norm, x)
        _require(normed.shape == x.shape and normed.dtype == x.dtype, f"{name} scratch", normed, x)

    # -- norms ----------------------------------------------------------------------------------

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight per row of x [T, H] (Zhang and Sennrich 2019)."""
        self._check(x=x, weight=weight, out=out)
        _require(x.ndim == 2 and weight.shape == x.shape[1:] and weight.dtype == x.dtype, "rmsnorm", x, weight)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._rmsnorm(x, weight, eps, out)
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

    # -- activations ----------------------------------------------------------------------------

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """silu(gate) * up; gate_up [T, 2 I] with the gate first -> [T, I] (Shazeer 2020)."""
        self._check(gate_up=gate_up, out=out)
        _require(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "silu_mul", gate_up)
        out = self._out(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        if out.size:
            self._silu_mul(gate_up, out)
        return out

    def gelu(self, x: Tensor, *, tanh: bool, out: Tensor | None = None) -> Tensor:
        """GELU elementwise (Hendrycks and Gimpel 2016): the tanh approximation or the exact erf form."""
        self._check(x=x, out=out)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._gelu(x, tanh, out)
        return out

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None: ...
    @abstractmethod
    def _rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    @abstractmethod
    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None: ...
    @abstractmethod
    def _silu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _gelu(self, x: Tensor, tanh: bool, out: Tensor) -> None: ...

    # What follows combines other operations; an implementation that can fuse them overrides it.

    def _matmul_silu_mul(self, x: Tensor, weight: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self._matmul(x, weight, None, gate_up, accumulate=False)
        self._silu_mul(gate_up, out)

    def _rmsnorm_matmul(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, normed: Tensor, out: Tensor
    ) -> None:
        self._rmsnorm(x, norm, eps, normed)
        self._matmul(normed, weight, bias, out, accumulate=False)

    def _rmsnorm_matmul_silu_mul(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, normed: Tensor, gate_up: Tensor, out: Tensor
    ) -> None:
        self._rmsnorm(x, norm, eps, normed)
        self._matmul_silu_mul(normed, weight, gate_up, out)
