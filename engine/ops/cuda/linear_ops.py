"""Matrix products: the table's best kernel for each, and compositions of what no kernel does at once.

A row's result may differ in its last bits between kernels, because they add in different orders; inside each of them
it does not depend on the other rows, except as their files say. With `batch_invariant` all products of 16-bit elements
add in one order, and a row's result has the same bits whatever kernel is chosen.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from tessera.engine.contract.errors import TesseraError
from tessera.engine.formats import AdapterRows, LinearWeight, LoraStack
from tessera.engine.ops.cuda.candidates import Chooser
from tessera.engine.ops.cuda.fp8_ops import Fp8LinearOps
from tessera.engine.ops.cuda.int8.ops import Int8LinearOps
from tessera.engine.ops.cuda.linear.decode import takes_sum
from tessera.engine.ops.cuda.linear.problem import FUSED_GATES, LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.lora import instantiations
from tessera.engine.ops.cuda.lora.expand import (
    BegunAdapters,
    begin_next,
    can_take_begun,
    launch_expand,
    launch_expand_silu_mul,
)
from tessera.engine.ops.cuda.lora.groups import groups_size, launch_group_rows
from tessera.engine.ops.cuda.lora.product import launch_adapted
from tessera.engine.ops.cuda.lora.shrink import launch_shrink, launch_shrink_norm
from tessera.engine.ops.cuda.quant.product import BlockOperands, Stored, is_dequantised, launch_block_product
from tessera.engine.ops.cuda.types import cuda_type
from tessera.engine.ops.linear_interface import Accumulate, Activate, Activation, Epilogue, LayerNorm, Prologue, RMSNorm
from tessera.engine.tensor import Tensor


class LinearOps(Int8LinearOps, Fp8LinearOps):
    _begun: BegunAdapters | None = None  # for the next product
    _turned: Tensor | None = None  # what the last product stored, for the next one

    @cached_property
    def linear_kernels(self) -> Chooser[LinearProblem, LinearOperands]:
        """Chooses the kernels of products; tests and benchmarks restrict it."""
        return Chooser(LINEAR, self.device)

    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None:
        operands = LinearOperands(x, weight, bias, out)
        problem = LinearProblem.of(operands, accumulates=accumulate, in_order=self.batch_invariant)
        if not self.linear_kernels.launch(problem, operands):
            raise TesseraError(f"no kernel that may be chosen does {problem}")

    def _linear(
        self, x: Tensor, weight: LinearWeight, prologue: Prologue | None, epilogue: Epilogue | None, out: Tensor
    ) -> None:
        turned, self._turned = self._turned, None
        if turned is not None and (turned.pointer, turned.shape) == (x.pointer, x.shape):
            blocks = BlockOperands(x, weight, out, room=self._room, is_turned=True)
            if launch_block_product(self.device, blocks, accumulates=isinstance(epilogue, Accumulate)) is None:
                raise TesseraError("a product's rows are turned for another than the next one")
            return
        around = (x, weight, prologue, epilogue, out)
        if weight.dense is None and (self._fp8_linear(*around) or self._int8_linear(*around)):
            return
        if not self._fused(*around):
            super()._linear(*around)

    def _linear_of_sum(
        self, x: Tensor, weight: LinearWeight, prologue: RMSNorm, epilogue: Epilogue | None, out: Tensor
    ) -> bool:
        return weight.dense is not None and self._fused(x, weight, prologue, epilogue, out)

    def _product(self, x: Tensor, weight: LinearWeight, out: Tensor, accumulate: bool) -> None:
        values = weight.dense
        if values is None:
            if weight.order is not None:
                x = self._in_order(x, weight.order)
            blocks = BlockOperands(x, weight, out, room=self._room)
            # In order, since that of blocks' products depends on the rows, and that of dequantised weights does not.
            if not self.batch_invariant and launch_block_product(self.device, blocks, accumulates=accumulate):
                return
            values = self._dequantized(weight, x.dtype)
        self._matmul(x, values, weight.bias, out, accumulate)

    def reserve_adapters(self, dtype: np.dtype[Any]) -> None:
        """Compile what adapters in `dtype` need, so that no step waits for it."""
        pairs = instantiations((cuda_type(dtype),))
        self.device.compile([(spec, template) for spec, template in pairs if spec.supports(self.device.arch)])

    def row_groups_size(self, num_rows: int, num_slots: int) -> int:
        return groups_size(num_rows, num_slots)

    def _group_rows(self, rows: AdapterRows, num_slots: int) -> None:
        launch_group_rows(self.device, rows, num_slots)

    def _add_adapters(self, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
        self._begin_adapters(x, stack, rows, out)
        self._finish_adapters(x, stack, rows, out)

    def _begin_adapters(self, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor) -> None:
        if not can_take_begun(self._begun, x, stack, out):
            self._begun = None
            launch_shrink(self.device, x, stack, rows, out)

    def _norm_and_begin_adapters(
        self, x: Tensor, norm: Prologue, stack: LoraStack, rows: AdapterRows, out: Tensor
    ) -> bool:
        self._begun = None
        # In order, the product with A is of the rounded norm, whatever the number of rows.
        return (
            not self.batch_invariant
            and isinstance(norm, RMSNorm)
            and launch_shrink_norm(self.device, x, norm, stack, rows, out)
        )

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
        function = epilogue.function if isinstance(epilogue, Activate) else None
        if self.batch_invariant or weight.dense is None or weight.order is not None:
            return False
        if function is not None and (function not in FUSED_GATES or weight.bias is not None):
            return False
        operands = LinearOperands(x, weight.dense, weight.bias, out)
        accumulates = isinstance(epilogue, Accumulate)
        gated, gelu = function is not None, function == "gelu_tanh_mul"
        problem = LinearProblem.of(operands, gated=gated, accumulates=accumulates, gelu=gelu)
        done = launch_adapted(
            self.device, self.linear_kernels, problem, operands, stack, rows, of_norm=of_norm, begun=self._begun
        )
        if done:
            self._begun = None
        return done

    def _finish_adapters(
        self, x: Tensor, stack: LoraStack, rows: AdapterRows, out: Tensor, *, of_norm: bool = False
    ) -> None:
        begun, self._begun = self._begun, None
        launch_expand(self.device, x, stack, rows, out, of_norm=of_norm, begun=begun)

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
        next_stack = None if self.batch_invariant else next_stack
        begun = begin_next(self.device, stack, x, next_stack, out)
        if function == "silu_mul" and launch_expand_silu_mul(
            self.device, x, stack, rows, product, out, of_norm=of_norm, begun=begun
        ):
            self._begun = begun
        else:
            super()._finish_adapters_and_activate(x, stack, rows, function, product, out, of_norm=of_norm)

    def _fused(
        self, x: Tensor, weight: LinearWeight, prologue: Prologue | None, epilogue: Epilogue | None, out: Tensor
    ) -> bool:
        """The product with the norm before it and what follows it in one kernel; False where none does that."""
        values, gated = weight.dense, isinstance(epilogue, Activate)
        if isinstance(prologue, LayerNorm) or weight.order is not None:
            return False
        if isinstance(epilogue, Activate) and (epilogue.function not in FUSED_GATES or weight.bias is not None):
            return False
        gelu = isinstance(epilogue, Activate) and epilogue.function == "gelu_tanh_mul"
        if values is None:
            if self.batch_invariant or gelu:
                return False
            norm, eps = (None, 0.0) if prologue is None else (prologue.weight, prologue.eps)
            next_weight = epilogue.next_weight if isinstance(epilogue, Activate) else None
            blocks = BlockOperands(x, weight, out, norm, eps, self._room, next_weight)
            accumulates = isinstance(epilogue, Accumulate)
            stored = launch_block_product(self.device, blocks, gated=gated, accumulates=accumulates)
            if stored is not None:
                self._turned = out if stored is Stored.TURNED else None
                return True
            return prologue is None and gated and self._gated_of_dequantised(x, weight, out)
        if isinstance(epilogue, Accumulate):
            return False
        if prologue is None:
            if not gated:
                return False  # a product alone
            operands = LinearOperands(x, values, None, out)
        else:
            operands = LinearOperands(x, values, weight.bias, out, prologue.weight, prologue.eps, prologue.added)
        problem = LinearProblem.of(operands, gated=gated, gelu=gelu, in_order=self.batch_invariant)
        if operands.added is not None and not takes_sum(self.linear_kernels.choose(problem), operands):
            return False
        return self.linear_kernels.launch(problem, operands)

    def _gated_of_dequantised(self, x: Tensor, weight: LinearWeight, out: Tensor) -> bool:
        """SiLU's gated product of many rows; False, and nothing done, where no kernel does it at once."""
        if not is_dequantised(self.device, weight, x.shape[0]):
            return False
        operands = LinearOperands(x, self._place_of(weight, x.dtype), None, out)
        problem = LinearProblem.of(operands, gated=True)
        if self.linear_kernels.choose(problem) is None:
            return False
        self._dequantized(weight, x.dtype)
        return self.linear_kernels.launch(problem, operands)
