"""What the products by experts' weights have in common: their operands, and how tiles are walked over."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.ops.linear_interface import Activation
from tessera.engine.ops.moe_interface import MAX_EXPERTS, Routed
from tessera.engine.tensor import Tensor

MOST_EXPERTS = Constant(MAX_EXPERTS)
declare_header("expert_tiles", __name__, {"MAX_EXPERTS": MOST_EXPERTS})

NONE, SILU, CLAMPED_SWIGLU = (Constant(kind) for kind in range(3))
ACTIVATIONS: dict[Activation | None, Constant] = {
    None: NONE,
    "silu_mul": SILU,
    "clamped_swiglu_mul": CLAMPED_SWIGLU,
}


class ExpertOperands(NamedTuple):
    """A product by the weights [E * N, K] of experts, as `Ops.expert_up` and `expert_down` have it.

    Attributes:
        x: [T, K], of which sorted row p takes that of pair p's token where `pairs` are given; else [P, K].
        weight: [E * N, K], dense.
        bias: [E * N].
        activation: of the product, or None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    routed: Routed
    gathers: bool
    activation: Activation | None
    out: Tensor

    @property
    def num_experts(self) -> int:
        return self.routed.offsets.size - 1

    @property
    def out_features(self) -> int:
        """Rows of one expert's weight."""
        return self.weight.shape[0] // self.num_experts

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def pairs(self) -> Tensor | None:
        return self.routed.pairs if self.gathers else None

    @property
    def top_k(self) -> int:
        return self.routed.experts.shape[1]

    @property
    def num_pairs(self) -> int:
        return self.routed.pairs.size
