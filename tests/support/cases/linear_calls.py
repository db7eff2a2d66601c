"""The ways in which serving calls `Ops.linear`, by dense weights."""

from __future__ import annotations

from tessera.engine.formats import LinearWeight
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Activate, Activation, RMSNorm
from tessera.engine.tensor import Tensor


def product_silu_mul(
    ops: Ops,
    x: Tensor,
    weight: Tensor,
    *,
    gate_up: Tensor,
    out: Tensor | None = None,
    function: Activation = "silu_mul",
) -> Tensor:
    """`function`: another gated activation."""
    return ops.linear(x, LinearWeight.of(weight), epilogue=Activate(function, gate_up), out=out)


def norm_product(
    ops: Ops,
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    normed: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    return ops.linear(x, LinearWeight.of(weight, bias), prologue=RMSNorm(norm, eps, normed), out=out)


def norm_product_silu_mul(
    ops: Ops,
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    *,
    normed: Tensor,
    gate_up: Tensor,
    out: Tensor | None = None,
    function: Activation = "silu_mul",
) -> Tensor:
    """`function`: another gated activation."""
    prologue, epilogue = RMSNorm(norm, eps, normed), Activate(function, gate_up)
    return ops.linear(x, LinearWeight.of(weight), prologue=prologue, epilogue=epilogue, out=out)
