"""Backward of matrix products, and columns of matrices; see `tessera.engine.ops.training.interface`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from tessera.engine.ops.checks import CheckedOps, require
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32, int32


class LinearTraining(CheckedOps):
    """Letters: M rows, K width of a row, N features, V rows of a table."""

    def matmul_input_gradient(self, dy: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Of `matmul`: dy [M, N] times weight [N, K] -> dx [M, K]."""
        self._check(dy=dy, weight=weight, out=out)
        fits = dy.ndim == 2 and weight.ndim == 2 and dy.shape[1] == weight.shape[0]
        require(fits and dy.dtype == weight.dtype and dy.dtype in FLOAT_DTYPES, "matmul_input_gradient", dy, weight)
        out = self._out(out, (dy.shape[0], weight.shape[1]), dy.dtype)
        if out.size:
            self._matmul_input_gradient(dy, weight, out)
        return out

    def matmul_weight_gradient(self, dy: Tensor, x: Tensor, out: Tensor, *, accumulate: bool) -> Tensor:
        """Of `matmul`: dy [M, N] transposed times x [M, K] -> [N, K] float32."""
        self._check(dy=dy, x=x, out=out)
        fits = dy.ndim == 2 and x.ndim == 2 and dy.shape[0] == x.shape[0]
        require(fits and dy.dtype == x.dtype and dy.dtype in FLOAT_DTYPES, "matmul_weight_gradient", dy, x)
        out = self._out(out, (dy.shape[1], x.shape[1]), float32)
        if out.size:
            self._matmul_weight_gradient(dy, x, out, accumulate)
        return out

    def sum_rows(self, x: Tensor, out: Tensor, *, accumulate: bool) -> Tensor:
        """The sum of the rows of x [M, N] -> [N] float32: the gradient of a bias."""
        self._check(x=x, out=out)
        require(x.ndim == 2 and x.dtype in FLOAT_DTYPES, "sum_rows", x)
        out = self._out(out, x.shape[1:], float32)
        if out.size:
            self._sum_rows(x, out, accumulate)
        return out

    def embedding_gradient(self, dy: Tensor, ids: Tensor, out: Tensor) -> Tensor:
        """out [V, K] float32 gets each row of dy [M, K] added at the row that ids [M] int32 names.

        Ids outside 0..V-1 add nothing. Rows of one id are summed in their order.
        """
        self._check(dy=dy, ids=ids, out=out)
        fits = dy.ndim == 2 and ids.shape == dy.shape[:1] and ids.dtype == int32 and dy.dtype in FLOAT_DTYPES
        require(fits, "embedding_gradient", dy, ids)
        require(out.ndim == 2 and out.shape[1] == dy.shape[1] and out.dtype == float32, "embedding_gradient", dy, out)
        if dy.size:
            self._embedding_gradient(dy, ids, out)
        return out

    def columns(self, x: Tensor, start: int, stop: int, *, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Columns start..stop-1 of x [M, N], times `factor`."""
        self._check(x=x, out=out)
        require(x.ndim == 2 and 0 <= start < stop <= x.shape[1] and x.dtype in FLOAT_DTYPES, "columns", x)
        out = self._out(out, (x.shape[0], stop - start), x.dtype)
        if out.size:
            self._columns(x, start, factor, out)
        return out

    def join_columns(self, parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Parts [M, N_i] side by side -> [M, sum of N_i]."""
        self._check(out=out, **{f"part {index}": part for index, part in enumerate(parts)})
        first = parts[0]
        alike = all(part.ndim == 2 and part.shape[0] == first.shape[0] and part.dtype == first.dtype for part in parts)
        require(alike and first.dtype in FLOAT_DTYPES, "join_columns", *parts)
        out = self._out(out, (first.shape[0], sum(part.shape[1] for part in parts)), first.dtype)
        if out.size:
            self._join_columns(parts, out)
        return out

    def add_columns(
        self, x: Tensor, part: Tensor, start: int, *, factor: float = 1.0, out: Tensor | None = None
    ) -> Tensor:
        """x [M, N] with factor * part [M, n] added to the columns from `start` on; `out` may be x."""
        self._check(x=x, part=part, out=out)
        fits = x.ndim == 2 and part.ndim == 2 and x.shape[0] == part.shape[0] and x.dtype == part.dtype
        require(fits and start >= 0 and start + part.shape[1] <= x.shape[1], "add_columns", x, part)
        require(x.dtype in FLOAT_DTYPES, "add_columns", x)
        out = self._out(out, x.shape, x.dtype)
        if out.size:
            self._add_columns(x, part, start, factor, out)
        return out

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _matmul_input_gradient(self, dy: Tensor, weight: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _matmul_weight_gradient(self, dy: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None: ...
    @abstractmethod
    def _sum_rows(self, x: Tensor, out: Tensor, accumulate: bool) -> None: ...
    @abstractmethod
    def _embedding_gradient(self, dy: Tensor, ids: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _columns(self, x: Tensor, start: int, factor: float, out: Tensor) -> None: ...
    @abstractmethod
    def _join_columns(self, parts: Sequence[Tensor], out: Tensor) -> None: ...
    @abstractmethod
    def _add_columns(self, x: Tensor, part: Tensor, start: int, factor: float, out: Tensor) -> None: ...
