"""Mixtures of experts: which kernels do their products.

A row's result depends on nothing but the row, and on which kernel does it, which the number of pairs and experts says;
with `batch_invariant` on nothing else at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.formats import LinearWeight, PackedFormat, WeightPart
from tessera.engine.ops.cuda.moe import blocks, decode, mxfp4, routing, rows, sm90, tiles
from tessera.engine.ops.cuda.moe.blocks import ExpertBlockOperands
from tessera.engine.ops.cuda.moe.experts import ExpertOperands
from tessera.engine.ops.cuda.moe.router import launch_router, router_kernels
from tessera.engine.ops.cuda.moe.routing import launch_route
from tessera.engine.ops.cuda.moe.rows import launch_combine, launch_gather
from tessera.engine.ops.cuda.quant.dequantize import DequantizeOps
from tessera.engine.ops.cuda.types import HALF_BYTES, cuda_type
from tessera.engine.ops.linear_interface import Activation, RMSNorm
from tessera.engine.ops.moe_interface import Routed, Routing
from tessera.engine.tensor import Tensor

FEW_ROWS = 8  # of an expert on average, up to which reading the weights bounds a product
FEW_ROWS_OF_BLOCKS = 64  # up to which weights in blocks are not dequantised beforehand
MOST_DEQUANTISED = 1 << 27  # elements at a time, unless one expert has more


class MoEOps(DequantizeOps):
    # Of which the kernels launched next find all there before they wait, because a product that waited for it has been
    # launched since (`decode.launch`).
    _settled: Routed | None = None

    def reserve_experts(self, experts: Iterable[tuple[LinearWeight, int]], dtype: np.dtype[Any]) -> None:
        """Compile and allocate beforehand what mixtures take; of each weight the number of experts in it."""
        experts = list(experts)
        if not experts:
            return
        name = cuda_type(dtype)
        kernels: list[Instantiation] = []
        for module in (rows, tiles, decode, sm90):
            kernels += module.instantiations((name,))
        kernels += routing.instantiations(tuple({name, "float"}))
        for weight, num_experts in experts:
            (part,) = weight.parts
            kernels += router_kernels(num_experts, weight.shape[1], name)
            if isinstance(part.format, PackedFormat):
                if dtype.itemsize == HALF_BYTES:
                    kernels += sorted(blocks.kernels_of(part.format, name), key=str)
                    kernels += mxfp4.kernels_of(part.format, name)
                size = weight.shape[0] // num_experts * weight.shape[1]
                self._scratch_of(_experts_at_a_time(size, num_experts) * size * dtype.itemsize)
        self.device.compile([pair for pair in dict.fromkeys(kernels) if pair[0].supports(self.device.arch)])

    def _route(
        self, logits: Tensor, routing: Routing, out: Routed, bias: Tensor | None, correction: Tensor | None
    ) -> None:
        self._settled = None
        launch_route(self.device, logits, routing, out, bias, correction)

    def _route_rows(
        self,
        x: Tensor,
        router: LinearWeight,
        routing: Routing,
        out: Routed,
        norm: RMSNorm | None,
        bias: Tensor | None,
        correction: Tensor | None,
    ) -> bool:
        self._settled = None
        weight = router.dense
        if self.batch_invariant or weight is None or router.bias is not None or router.order is not None:
            return False
        return launch_router(self.device, x, norm, weight, routing, out, bias, correction)

    def _expert_up(
        self,
        x: Tensor,
        weight: LinearWeight,
        routed: Routed,
        activation: Activation,
        product: Tensor,
        gathered: Tensor,
        out: Tensor,
    ) -> None:
        if self._in_blocks(ExpertBlockOperands(x, weight, routed, True, activation, out)):
            return
        is_gathered = False
        for operands in self._dense(ExpertOperands(x, x, weight.bias, routed, True, activation, out), weight):
            if self._few(routed) and weight.dense is not None and decode.launch(self.device, operands):
                self._settled = routed
                return
            sorted_rows = operands._replace(x=gathered, gathers=False)
            if sm90.can_do(self.device, sorted_rows):
                if not is_gathered:
                    launch_gather(self.device, x, routed, gathered)
                is_gathered = True
                sm90.launch(self.device, sorted_rows)
            else:
                tiles.launch(self.device, operands._replace(activation=None, out=product))
        if not is_gathered:
            self._activate(activation, product, out)

    def _expert_down(self, x: Tensor, weight: LinearWeight, routed: Routed, out: Tensor) -> None:
        if self._in_blocks(ExpertBlockOperands(x, weight, routed, False, None, out)):
            return
        for operands in self._dense(ExpertOperands(x, x, weight.bias, routed, False, None, out), weight):
            settled = self._settled is routed
            if self._few(routed) and weight.dense is not None and decode.launch(self.device, operands, settled=settled):
                return
            if sm90.can_do(self.device, operands):
                sm90.launch(self.device, operands)
            else:
                tiles.launch(self.device, operands)

    def _combine_experts(
        self,
        x: Tensor,
        routed: Routed,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        accumulate: bool,
        out: Tensor,
    ) -> None:
        settled = self._settled is routed
        self._settled = None  # what `out` holds now is not
        launch_combine(self.device, x, routed, shared, shared_gate, out, accumulate=accumulate, settled=settled)

    def _few(self, routed: Routed, rows: int = FEW_ROWS) -> bool:
        return not self.batch_invariant and routed.pairs.size <= rows * (routed.offsets.size - 1)

    def _in_blocks(self, operands: ExpertBlockOperands) -> bool:
        """The product by a weight as it is stored; False where it is dense, or better dequantised."""
        if operands.weight.dense is not None:
            return False
        routed = operands.routed
        settled = not operands.gathers and self._settled is routed
        if self._few(routed, mxfp4.MOST_ROWS) and mxfp4.launch(self.device, operands, settled=settled):
            self._settled = routed
            return True
        return self._few(routed, FEW_ROWS_OF_BLOCKS) and blocks.launch(self.device, operands)

    def _dense(self, operands: ExpertOperands, weight: LinearWeight) -> Iterator[ExpertOperands]:
        """The product by a dense weight, or several, each by some experts' weights, dequantised."""
        if weight.dense is not None:
            yield operands._replace(weight=weight.dense)
            return
        routed, (part,) = operands.routed, weight.parts
        num_experts, columns = routed.offsets.size - 1, weight.shape[1]
        size = weight.shape[0] // num_experts  # rows of an expert
        at_a_time = _experts_at_a_time(size * columns, num_experts)
        for start in range(0, num_experts, at_a_time):
            end = min(start + at_a_time, num_experts)
            place = slice(start * size, end * size)
            tensors = {name: tensor[place] for name, tensor in part.tensors.items()}
            some = LinearWeight((WeightPart(part.format, ((end - start) * size, columns), tensors),))
            yield operands._replace(
                weight=self._dequantized(some, operands.x.dtype),
                bias=None if weight.bias is None else weight.bias[place],
                routed=routed._replace(offsets=routed.offsets[start : end + 1]),
            )


def _experts_at_a_time(size: int, num_experts: int) -> int:
    """Of which weights are dequantised at a time; `size` elements each."""
    return min(max(MOST_DEQUANTISED // size, 1), num_experts)
