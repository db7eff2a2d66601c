"""Matrix products, alone and fused with the norm before and the activation or addition after them.

`linear` takes a weight of any format and says what surrounds the product; an implementation fuses what it can
and composes the rest from other operations.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from tessera.engine.formats import AdapterRows, LinearWeight, LoraStack, WeightFormat
from tessera.engine.ops.checks import CheckedOps, require
from tessera.engine.ops.layer_interface import LayerOps
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32, int32

# `*_mul` are gated: the first half of the features passes the function and multiplies the second half.
Activation = Literal[
    "silu_mul", "clamped_swiglu_mul", "gelu_tanh_mul", "gelu_erf_mul", "gelu_tanh", "gelu_erf", "relu", "relu2"
]


def is_gated(activation: Activation) -> bool:
    return activation.endswith("_mul")


@dataclass(frozen=True)
class AddedNorm:
    """Before a norm: `rmsnorm_add(update, weight, eps, stream=x, out=out)` takes the place of x.

    `update` and `out` are like x; `out` is neither of them, since many blocks read what one of them adds.
    """

    update: Tensor
    weight: Tensor
    eps: float
    out: Tensor


@dataclass(frozen=True)
class RMSNorm:
    """Prologue: the product is of `rmsnorm(x, weight, eps)`; `scratch` is like x, undefined afterwards."""

    weight: Tensor
    eps: float
    scratch: Tensor
    added: AddedNorm | None = None


@dataclass(frozen=True)
class LayerNorm:
    """Prologue: the product is of `layernorm(x, weight, bias, eps)`; `scratch` is like x, undefined afterwards."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    scratch: Tensor


@dataclass(frozen=True)
class Accumulate:
    """Epilogue: the product is added to what `out` holds, and the sum rounded once."""


@dataclass(frozen=True)
class Activate:
    """Epilogue: the activation of the product; `scratch` [M, N] is like x, undefined afterwards.

    `next_weight`: which the next call of `linear` multiplies the result by, as it is; nothing else may read the result.
    """

    function: Activation
    scratch: Tensor
    next_weight: LinearWeight | None = None


Prologue: TypeAlias = RMSNorm | LayerNorm
Epilogue: TypeAlias = Accumulate | Activate


class LinearOps(LayerOps, CheckedOps):
    """Letters: M rows, K width of a row, N features.

    Attributes:
        dequantises: whether products of many rows dequantise some of the weights to 16 bits first.
    """

    dequantises = False

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
        what `out` holds, and rounded once.
        """
        self._check(x=x, weight=weight, bias=bias, out=out)
        require(x.ndim == 2 and weight.ndim == 2 and x.shape[1] == weight.shape[1], "matmul", x, weight)
        require(x.dtype == weight.dtype and x.dtype in FLOAT_DTYPES, "matmul", x, weight)
        if bias is not None:
            require(bias.shape == (weight.shape[0],) and bias.dtype == x.dtype, "matmul bias", bias, weight)
        require(out is not None or not accumulate, "matmul that accumulates needs out", x, weight)
        out = self._out(out, (x.shape[0], weight.shape[0]), x.dtype, also=float32)
        if out.size:
            self._matmul(x, weight, bias, out, accumulate)
        return out

    def linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        *,
        prologue: Prologue | None = None,
        epilogue: Epilogue | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """epilogue(prologue(x) W^T + bias); x [M, K], W [N, K] -> [M, N], or [M, N / 2] after a gated activation.

        Where the weight has adapters and their selection names rows, each row's adapter adds to its product. The result
        of a row without one is then that of prologue, product and epilogue done one after the other, or with product
        and epilogue in one kernel that of a step without adapters.

        The result has x's dtype; without an activation it may be float32 if `out` says so (logits).
        """
        self._check(x=x, weight=weight, out=out)
        fits = x.ndim == 2 and x.shape[1] == weight.shape[1] and x.dtype in weight.activation_dtypes
        require(fits, "linear", x, weight)
        if prologue is not None:
            self._check_prologue(x, prologue)
        if isinstance(epilogue, Accumulate):
            require(out is not None, "linear that accumulates needs out", x)
        features, also = weight.shape[0], float32
        if isinstance(epilogue, Activate):
            self._check(scratch=epilogue.scratch)
            like_product = epilogue.scratch.shape == (x.shape[0], features) and epilogue.scratch.dtype == x.dtype
            require(like_product, "activation's scratch", epilogue.scratch, x)
            if is_gated(epilogue.function):
                require(features % 2 == 0, "gated activation of an odd number of features", epilogue.scratch)
                features //= 2
            also = x.dtype
        out = self._out(out, (x.shape[0], features), x.dtype, also=also)
        if out.size:
            stack = weight.adapters
            adapts = stack is not None and stack.selection.rows is not None
            if isinstance(prologue, RMSNorm) and prologue.added is not None:
                if not adapts and self._linear_of_sum(x, weight, prologue, epilogue, out):
                    return out
                added, prologue = prologue.added, replace(prologue, added=None)
                self._rmsnorm_add(added.update, added.weight, added.eps, x, added.out)
                x = added.out
            if stack is None or stack.selection.rows is None:
                self._linear(x, weight, prologue, epilogue, out)
            else:
                self._adapted_linear(x, weight, stack, stack.selection.rows, prologue, epilogue, out)
        return out

    def dequantize(self, weight: LinearWeight, dtype: np.dtype[Any]) -> Tensor:
        """The elements [N, K] of a weight without an order of columns, in `dtype`, until the next call of this or of a
        product."""
        self._check(weight=weight)
        require(weight.order is None and dtype in FLOAT_DTYPES, f"dequantize to {dtype}", weight)
        dense = weight.dense
        return dense if dense is not None and dense.dtype == dtype else self._dequantized(weight, dtype)

    def group_rows(self, rows: AdapterRows, num_slots: int) -> None:
        """Sort rows by slot into their `groups`, where products need that; once before the products of a step."""
        self._check(slots=rows.slots, groups=rows.groups)
        if rows.groups is not None and rows.slots.size:
            size = self.row_groups_size(rows.slots.shape[0], num_slots)
            require(rows.groups.dtype == int32 and rows.groups.size >= size, "groups of rows", rows.groups)
            self._group_rows(rows, num_slots)

    def row_groups_size(self, num_rows: int, num_slots: int) -> int:
        """Elements of the `groups` [G] int32 of so many rows; 0: none are needed."""
        return 0

    def multiplies_stored(self, format: WeightFormat, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
        """Whether products of `dtype` take such a matrix [N, K] best as a checkpoint stores it."""
        return False

    def _check_prologue(self, x: Tensor, prologue: Prologue) -> None:
        weight, scratch = prologue.weight, prologue.scratch
        self._check(norm=weight, scratch=scratch)
        require(weight.shape == x.shape[1:] and weight.dtype == x.dtype, "norm", weight, x)
        require(scratch.shape == x.shape and scratch.dtype == x.dtype, "norm's scratch", scratch, x)
        if isinstance(prologue, RMSNorm) and (added := prologue.added) is not None:
            self._check(update=added.update, weight=added.weight, out=added.out)
            for tensor, shape in ((added.update, x.shape), (added.out, x.shape), (added.weight, weight.shape)):
                require(tensor.shape == shape and tensor.dtype == x.dtype, "norm that is added", tensor, x)
            require(added.out.pointer not in (x.pointer, added.update.pointer), "sum before a norm", added.out, x)
        if isinstance(prologue, LayerNorm) and prologue.bias is not None:
            self._check(bias=prologue.bias)
            require(prologue.bias.shape == weight.shape and prologue.bias.dtype == x.dtype, "norm's bias", weight, x)

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None: ...

    @abstractmethod
    def _product(self, x: Tensor, weight: LinearWeight, out: Tensor, accumulate: bool) -> None:
        """`matmul` by a weight of any format."""

    @abstractmethod
    def _dequantized(self, weight: LinearWeight, dtype: np.dtype[Any]) -> Tensor: ...

    @abstractmethod
    def _add_adapters(self, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
        """Add factor * (x A^T) B^T to the rows of out [M, N] that have an adapter; others stay bit for bit.

        x A^T is in float32, and each sum is rounded once.
        """

    def _begin_adapters(self, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
        """What of `_add_adapters` does not need the product, in front of it."""

    def _norm_and_begin_adapters(
        self, x: Tensor, norm: Prologue, stack: LoraStack, rows: AdapterRows, out: Tensor
    ) -> bool:
        """The norm of x into its scratch, and `_begin_adapters` of that; False, and nothing done, where no kernel does
        both. What follows is then `of_norm`."""
        return False

    def _adapted_product(
        self,
        x: Tensor,
        weight: LinearWeight,
        stack: LoraStack,
        rows: AdapterRows,
        epilogue: Epilogue | None,
        out: Tensor,
        *,
        of_norm: bool = False,
    ) -> bool:
        """Behind `_begin_adapters` all that is left: product, adapters and epilogue; False, and nothing done, where no
        kernel does that at once."""
        return False

    def _finish_adapters(
        self, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor, *, of_norm: bool = False
    ) -> None:
        """The rest of it, with the same tensors."""
        self._add_adapters(x, stack, rows, out)

    def _finish_adapters_and_activate(
        self,
        x: Tensor,
        stack: LoraStack,
        rows: AdapterRows,
        function: Activation,
        product: Tensor,
        out: Tensor,
        *,
        of_norm: bool = False,
        next_stack: LoraStack | None = None,
    ) -> None:
        """The rest of `_add_adapters` to the product, then its activation into out; the product is undefined
        afterwards. `next_stack`: of the product that follows."""
        self._finish_adapters(x, stack, rows, product, of_norm=of_norm)
        self._activate(function, product, out)

    def _group_rows(self, rows: AdapterRows, num_slots: int) -> None:
        """For implementations with a `row_groups_size`."""

    def _linear(
        self, x: Tensor, weight: LinearWeight, prologue: Prologue | None, epilogue: Epilogue | None, out: Tensor
    ) -> None:
        """Composed from other operations; an implementation that can fuse them overrides it."""
        if prologue is not None:
            self._normalise(x, prologue)
            self._linear(prologue.scratch, weight, None, epilogue, out)
        elif isinstance(epilogue, Activate):
            self._product(x, weight, epilogue.scratch, accumulate=False)
            self._activate(epilogue.function, epilogue.scratch, out)
        else:
            self._product(x, weight, out, accumulate=epilogue is not None)

    def _linear_of_sum(
        self, x: Tensor, weight: LinearWeight, prologue: RMSNorm, epilogue: Epilogue | None, out: Tensor
    ) -> bool:
        """`_linear` with the prologue's addition in the same kernel; False, and nothing done, where none does that."""
        return False

    def _adapted_linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        stack: LoraStack,
        rows: AdapterRows,
        prologue: Prologue | None,
        epilogue: Epilogue | None,
        out: Tensor,
    ) -> None:
        require(
            rows.slots.shape == x.shape[:1] and stack.a.dtype == x.dtype, "adapters of rows", rows.slots, stack.a, x
        )
        product = epilogue.scratch if isinstance(epilogue, Activate) else out
        of_norm = prologue is not None and self._norm_and_begin_adapters(x, prologue, stack, rows, product)
        if prologue is not None:
            if not of_norm:
                self._normalise(x, prologue)
            x = prologue.scratch
        if not of_norm:
            self._begin_adapters(x, stack, rows, product)
        if self._adapted_product(x, weight, stack, rows, epilogue, out, of_norm=of_norm):
            return
        self._linear(x, weight, None, epilogue if isinstance(epilogue, Accumulate) else None, product)
        if isinstance(epilogue, Activate):
            after = epilogue.next_weight
            next_stack = None if after is None else after.adapters
            self._finish_adapters_and_activate(
                x, stack, rows, epilogue.function, product, out, of_norm=of_norm, next_stack=next_stack
            )
        else:
            self._finish_adapters(x, stack, rows, product, of_norm=of_norm)

    def _normalise(self, x: Tensor, norm: Prologue) -> None:
        """Into its scratch."""
        if isinstance(norm, RMSNorm):
            self._rmsnorm(x, norm.weight, norm.eps, norm.scratch)
        else:
            self._layernorm(x, norm.weight, norm.bias, norm.eps, norm.scratch)

    def _activate(self, function: Activation, x: Tensor, out: Tensor) -> None:
        if function == "silu_mul":
            self._silu_mul(x, out)
        elif function == "clamped_swiglu_mul":
            self._clamped_swiglu_mul(x, out)
        elif is_gated(function):
            self._gelu_mul(x, function == "gelu_tanh_mul", out)
        elif function in ("relu", "relu2"):
            self._relu(x, function == "relu2", out)
        else:
            self._gelu(x, function == "gelu_tanh", out)
