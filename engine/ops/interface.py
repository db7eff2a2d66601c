"""The operations a forward needs, as one interface with two implementations.

Public methods check shapes, dtypes and devices, make `out` where none is given, and call the
implementation's method of the same name with an underscore. All inputs and the output live on the
implementation's device; an input from another device is an error that names both. Floating-point
work is accumulated in float32 whatever the dtype of inputs and outputs.

Letters: T tokens, R sequences, S sampled rows, H hidden size, V vocabulary, D head size, Hq query
heads, Hkv key/value heads. Only leading dimensions may be 0, and then nothing is done.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from tessera.engine.formats import LinearWeight, PackedBlockFormat, WeightPart
from tessera.engine.ops.attention_interface import AttentionMetadata, AttentionOps, HeadTransform
from tessera.engine.ops.checks import require as _require
from tessera.engine.ops.encoder_interface import EncoderOps
from tessera.engine.ops.linear_interface import LinearOps
from tessera.engine.ops.moe_interface import MoEOps
from tessera.engine.ops.sampling_interface import SamplingOps
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32, int32, uint8

__all__ = ["AttentionMetadata", "HeadTransform", "Ops", "RareOp"]

# Operations that few models have: attention with a soft cap or sinks, and methods of `Ops`.
RareOp = Literal["soft_cap", "sinks", "relu", "rmsnorm_add", "norm_columns", "rotate"]


class Ops(LinearOps, MoEOps, AttentionOps, EncoderOps, SamplingOps):
    """See the module's description; `out` may be given to write into memory made beforehand."""

    def softmax(self, x: Tensor, *, log: bool = False, out: Tensor | None = None) -> Tensor:
        """softmax (or its logarithm) over each row of x [M, N] -> [M, N] float32."""
        self._check(x=x, out=out)
        _require(x.ndim == 2 and x.dtype in FLOAT_DTYPES, "softmax", x)
        out = self._out(out, x.shape, float32)
        if x.size:
            self._softmax(x, log, out)
        return out

    # -- elementwise and rows -------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a + b of equal shape; `out` may be `a`."""
        return self._binary("add", a, b, out)

    def mul(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a * b of equal shape; `out` may be `a`."""
        return self._binary("mul", a, b, out)

    def scale(self, x: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
        """x * factor; `out` may be `x`."""
        self._check(x=x, out=out)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._scale(x, factor, out)
        return out

    def soft_cap(self, x: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
        """cap * tanh(x / cap), which stays within -cap .. cap (Gemma 2); `out` may be `x`."""
        self._check(x=x, out=out)
        _require(x.dtype in FLOAT_DTYPES and cap > 0, "soft_cap", x)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._soft_cap(x, cap, out)
        return out

    def copy(self, x: Tensor, out: Tensor) -> Tensor:
        """x into `out` of the same shape, converting between float dtypes."""
        self._check(x=x, out=out)
        _require(x.shape == out.shape and (x.dtype == out.dtype or x.dtype in FLOAT_DTYPES), "copy", x, out)
        _require(x.dtype == out.dtype or out.dtype in FLOAT_DTYPES, "copy", x, out)
        if x.size:
            self._copy(x, out)
        return out

    def embedding(
        self,
        ids: Tensor,
        table: Tensor,
        out: Tensor | None = None,
        *,
        sampled: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Rows of table [V, H] chosen by ids [T] int32, times `factor` -> [T, H]; an id outside 0..V-1 gives zeros.

        With `sampled` [N] int32 a negative id -1 - n stands for sampled[n], which the host may not know yet.
        """
        self._check(ids=ids, table=table, out=out, sampled=sampled)
        _require(ids.ndim == 1 and ids.dtype == int32 and table.ndim == 2, "embedding", ids, table)
        if sampled is not None:
            _require(sampled.ndim == 1 and sampled.dtype == int32, "embedding", sampled)
        out = self._out(out, (ids.shape[0], table.shape[1]), table.dtype)
        if out.size:
            self._embedding(ids, table, sampled, factor, out)
        return out

    def lookup(
        self,
        ids: Tensor,
        table: LinearWeight,
        *,
        sampled: Tensor | None = None,
        factor: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """`embedding` by a weight of one part in any format; where it is not dense, `out` says the dtype."""
        if table.dense is not None:
            return self.embedding(ids, table.dense, out, sampled=sampled, factor=factor)
        (part,) = table.parts
        tensors = tuple(part.tensors.values())
        _require(out is not None and ids.ndim == 1 and ids.dtype == int32, "lookup", ids, *tensors)
        assert out is not None
        self._check(ids=ids, sampled=sampled, out=out, **part.tensors)
        _require(out.shape == (ids.shape[0], part.shape[1]) and out.dtype in FLOAT_DTYPES, "lookup", ids, out)
        if sampled is not None:
            _require(sampled.ndim == 1 and sampled.dtype == int32, "lookup", sampled)
        if out.size:
            self._lookup(ids, part, sampled, out)
            if factor != 1.0:
                self._scale(out, factor, out)
        return out

    def pack_blocks(self, stored: Tensor, part: WeightPart, first: int) -> None:
        """Rows as a GGUF file has them, [n, bytes of a row] uint8, to the rows of a packed part from `first` on."""
        format, (rows, columns) = part.format, part.shape
        assert isinstance(format, PackedBlockFormat)
        self._check(stored=stored, **part.tensors)
        fits = stored.ndim == 2 and stored.dtype == uint8 and stored.shape[1] == format.type.row_bytes(columns)
        _require(fits and first >= 0 and first + stored.shape[0] <= rows, "pack_blocks", stored, *part.tensors.values())
        if stored.size:
            self._pack_blocks(stored, part, first)

    def scatter(self, table: Tensor, rows: Tensor, columns: Tensor | None, values: Tensor) -> None:
        """table[rows[i], columns[i]] = values[i]; table [N, W], the others [U], all int32.

        No columns means column 0. A row below 0 is skipped; no place may be named twice.
        """
        self._check(table=table, rows=rows, columns=columns, values=values)
        _require(table.ndim == 2 and table.dtype == rows.dtype == values.dtype == int32, "scatter", table, rows, values)
        _require(rows.ndim == 1 and rows.shape == values.shape, "scatter", rows, values)
        if columns is not None:
            _require(columns.shape == rows.shape and columns.dtype == int32, "scatter", columns, rows)
        if rows.size:
            self._scatter(table, rows, columns, values)

    def fill_normal(self, out: Tensor, *, std: float, seed: int, mean: float = 0.0) -> Tensor:
        """Normal random numbers from Philox keyed by `seed` and element index (dummy weights)."""
        self._check(out=out)
        if out.size:
            self._fill_normal(out, mean, std, seed)
        return out

    def _binary(self, name: str, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        self._check(a=a, b=b, out=out)
        _require(a.shape == b.shape and a.dtype == b.dtype, name, a, b)
        out = self._out(out, a.shape, a.dtype)
        if a.size:
            (self._add if name == "add" else self._mul)(a, b, out)
        return out

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _softmax(self, x: Tensor, log: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _add(self, a: Tensor, b: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _mul(self, a: Tensor, b: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _scale(self, x: Tensor, factor: float, out: Tensor) -> None: ...
    @abstractmethod
    def _soft_cap(self, x: Tensor, cap: float, out: Tensor) -> None: ...
    @abstractmethod
    def _copy(self, x: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _embedding(self, ids: Tensor, table: Tensor, sampled: Tensor | None, factor: float, out: Tensor) -> None: ...
    @abstractmethod
    def _lookup(self, ids: Tensor, part: WeightPart, sampled: Tensor | None, out: Tensor) -> None: ...
    @abstractmethod
    def _pack_blocks(self, stored: Tensor, part: WeightPart, first: int) -> None: ...
    @abstractmethod
    def _scatter(self, table: Tensor, rows: Tensor, columns: Tensor | None, values: Tensor) -> None: ...
    @abstractmethod
    def _fill_normal(self, out: Tensor, mean: float, std: float, seed: int) -> None: ...
