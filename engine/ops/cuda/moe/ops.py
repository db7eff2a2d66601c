"""Mixtures of experts, which run on the CPU alone."""

from __future__ import annotations

from typing import NoReturn

from tessera.engine.contract.errors import TesseraError
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.ops.moe_interface import Routed, Routing
from tessera.engine.tensor import Tensor


class MoEOps(Ops):
    def _route(
        self, logits: Tensor, routing: Routing, out: Routed, bias: Tensor | None, correction: Tensor | None
    ) -> None:
        _refuse()

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
        _refuse()

    def _expert_down(self, x: Tensor, weight: LinearWeight, routed: Routed, out: Tensor) -> None:
        _refuse()

    def _combine_experts(
        self,
        x: Tensor,
        routed: Routed,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        accumulate: bool,
        out: Tensor,
    ) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise TesseraError("mixtures of experts run on the CPU alone: use --device cpu")
