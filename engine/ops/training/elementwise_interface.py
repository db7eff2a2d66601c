"""Elementwise operations that a forward for serving does not need; see `tessera.engine.ops.training.interface`."""

from __future__ import annotations

from abc import abstractmethod

from tessera.engine.ops.checks import CheckedOps, require
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32


class ElementwiseTraining(CheckedOps):
    """Letters: M rows, N width of a row."""

    def sub(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a - b of equal shape; `out` may be either."""
        out = self._pair("sub", a, b, out)
        if out.size:
            self._sub(a, b, out)
        return out

    def div(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a / b of equal shape; a division by 0 is infinite or NaN. `out` may be either."""
        out = self._pair("div", a, b, out)
        if out.size:
            self._div(a, b, out)
        return out

    def add_row(self, x: Tensor, row: Tensor, out: Tensor | None = None) -> Tensor:
        """row [N] added to every row of x [M, N]; `out` may be x."""
        self._check(x=x, row=row, out=out)
        fits = x.ndim == 2 and row.shape == x.shape[1:] and row.dtype == x.dtype and x.dtype in FLOAT_DTYPES
        require(fits, "add_row", x, row)
        out = self._out(out, x.shape, x.dtype)
        if out.size:
            self._add_row(x, row, out)
        return out

    def sum(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The sum of all elements -> [1] float32."""
        self._check(x=x, out=out)
        require(x.dtype in FLOAT_DTYPES, "sum", x)
        out = self._out(out, (1,), float32)
        self._sum(x, out)
        return out

    def broadcast(self, x: Tensor, out: Tensor) -> Tensor:
        """The one element of x [1] to every element of `out`: the gradient of `sum`."""
        self._check(x=x, out=out)
        require(x.shape == (1,) and x.dtype in FLOAT_DTYPES and out.dtype in FLOAT_DTYPES, "broadcast", x, out)
        if out.size:
            self._broadcast(x, out)
        return out

    def add_to(self, out: Tensor, x: Tensor, *, factor: float = 1.0) -> Tensor:
        """out += factor * x, of equal shape; their float dtypes may differ."""
        self._check(out=out, x=x)
        fits = out.shape == x.shape and out.dtype in FLOAT_DTYPES and x.dtype in FLOAT_DTYPES
        require(fits, "add_to", out, x)
        if x.size:
            self._add_to(out, x, factor)
        return out

    def _pair(self, name: str, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        self._check(a=a, b=b, out=out)
        require(a.shape == b.shape and a.dtype == b.dtype and a.dtype in FLOAT_DTYPES, name, a, b)
        return self._out(out, a.shape, a.dtype)

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _sub(self, a: Tensor, b: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _div(self, a: Tensor, b: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _add_row(self, x: Tensor, row: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _sum(self, x: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _broadcast(self, x: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _add_to(self, out: Tensor, x: Tensor, factor: float) -> None: ...
