"""Mixtures of experts: routing, products by the chosen experts' weights, and the sum of their outputs.

The weights of all experts are one `LinearWeight` [E * N, K], expert after expert. A token and one of its experts are a
pair; pairs are numbered token by token, `token * k + i`, and computed sorted by expert. All counts stay on the device.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tessera.engine.formats import LinearWeight
from tessera.engine.ops.checks import CheckedOps
from tessera.engine.ops.checks import require as _require
from tessera.engine.ops.linear_interface import Activation, RMSNorm, is_gated
from tessera.engine.tensor import FLOAT_DTYPES, Tensor, float32, int32

RoutingKind = Literal["softmax", "softmax_of_chosen", "sigmoid", "sparsemixer"]

MAX_EXPERTS = 512
MAX_TOP_K = 32
MAX_EXPERT_GROUPS = 32


@dataclass(frozen=True)
class Routing:
    """How a token's experts, and their weights, follow from its router logits.

    Attributes:
        kind: `softmax` chooses the largest logits and weighs by the softmax over all of them; with a correction it
            chooses by the softmax plus that. `softmax_of_chosen` weighs by the softmax over the chosen ones.
            `sigmoid` weighs by the sigmoid, and chooses by that plus a correction (DeepSeek-AI 2024). `sparsemixer`
            takes the softmax over the logits near the largest one, and again without it (Liu et al. 2024).
        normalised: weights are divided by their sum.
        scale: of the weights, at last.
        groups, chosen_groups: of `sigmoid`: experts are chosen from as many of the groups, those of which the two best
            scores have the largest sums.
        jitter: of `sparsemixer`: logits farther below the largest one than 2 * jitter of the larger magnitude are left
            out.
    """

    kind: RoutingKind
    top_k: int
    normalised: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    jitter: float = 0.0


class Routed(NamedTuple):
    """The choice of experts for T tokens.

    Attributes:
        experts: [T, k] int32.
        weights: [T, k] float32, of the experts' outputs.
        offsets: [E + 1] int32: sorted by expert, pairs offsets[e] to offsets[e + 1] - 1 are those of expert e.
        pairs: [T * k] int32: the number of each of the sorted pairs, ascending for each expert.
        places: [T * k] int32: where each pair is among the sorted ones.
    """

    experts: Tensor
    weights: Tensor
    offsets: Tensor
    pairs: Tensor
    places: Tensor


class MoEOps(CheckedOps):
    """Letters: T tokens, k experts of each, E experts, P = T * k pairs, K width of a row, N rows of an expert."""

    def route(
        self,
        logits: Tensor,
        routing: Routing,
        out: Routed,
        *,
        bias: Tensor | None = None,
        correction: Tensor | None = None,
    ) -> None:
        """Choose experts by logits [T, E] float32, plus bias [E]; `correction` [E] float32 is that of `sigmoid` or
        `softmax`.

        Of equal scores that of the lower expert number counts as larger. An expert's score that is NaN counts as the
        smallest.
        """
        self._check(logits=logits, bias=bias, correction=correction, **out._asdict())
        _require(logits.ndim == 2 and logits.dtype == float32, "route", logits)
        self._check_routing(logits, logits.shape, routing, out, bias, correction)
        if logits.size:
            self._route(logits, routing, out, bias, correction)

    def route_rows(
        self,
        x: Tensor,
        router: LinearWeight,
        routing: Routing,
        out: Routed,
        *,
        norm: RMSNorm | None = None,
        bias: Tensor | None = None,
        correction: Tensor | None = None,
    ) -> bool:
        """`route` by the logits of x [T, K], or of its norm, by the weight [E, K] of a router, in one step.

        False, and nothing done, where that takes several operations. The normed rows are left in `norm.scratch`.
        """
        self._check(x=x, router=router, bias=bias, correction=correction, **out._asdict())
        _require(x.ndim == 2 and router.shape[1] == x.shape[1] and x.dtype in FLOAT_DTYPES, "route_rows", x, router)
        self._check_routing(x, (x.shape[0], router.shape[0]), routing, out, bias, correction)
        if norm is not None:
            self._check(norm=norm.weight, scratch=norm.scratch)
            fits = norm.weight.shape == x.shape[1:] and norm.weight.dtype == x.dtype
            fits = fits and norm.scratch.shape == x.shape and norm.scratch.dtype == x.dtype
            _require(fits, "norm before a router", x, norm.weight, norm.scratch)
        return x.size > 0 and self._route_rows(x, router, routing, out, norm, bias, correction)

    def _check_routing(
        self,
        operand: Tensor,
        shape: tuple[int, ...],
        routing: Routing,
        out: Routed,
        bias: Tensor | None,
        correction: Tensor | None,
    ) -> None:
        """`shape` [T, E]: of the logits, which `operand` is or makes."""
        (num_tokens, num_experts), top_k = shape, routing.top_k
        _require(0 < top_k <= min(num_experts, MAX_TOP_K) and num_experts <= MAX_EXPERTS, "route", operand)
        _require(num_experts % routing.groups == 0 and routing.groups <= MAX_EXPERT_GROUPS, "expert groups", operand)
        in_groups = num_experts // routing.groups * routing.chosen_groups
        _require(routing.chosen_groups <= routing.groups and top_k <= in_groups, "expert groups", operand)
        for vector in (bias, correction):
            if vector is not None:
                _require(
                    vector.shape == (num_experts,) and vector.dtype in FLOAT_DTYPES, "router bias", vector, operand
                )
        if correction is not None:
            fits = correction.dtype == float32 and routing.kind in ("sigmoid", "softmax")
            _require(fits, "router correction", correction)
        shape = (num_tokens, top_k)
        _require(out.experts.shape == shape and out.experts.dtype == int32, "chosen experts", out.experts)
        _require(out.weights.shape == shape and out.weights.dtype == float32, "weights of experts", out.weights)
        _require(out.offsets.shape == (num_experts + 1,) and out.offsets.dtype == int32, "offsets", out.offsets)
        for pairs in (out.pairs, out.places):
            _require(pairs.shape == (out.experts.size,) and pairs.dtype == int32, "pairs", pairs)

    def expert_up(
        self,
        x: Tensor,
        weight: LinearWeight,
        routed: Routed,
        activation: Activation,
        *,
        product: Tensor,
        gathered: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Row p of [P, I] is the activation of x's row of pair p, sorted by expert, times its expert's weight.

        x [T, K], weight [E * N, K], N = 2 I where the activation is gated. `product` [P, N] and `gathered` [P, K] are
        scratch.
        """
        self._check_experts(x, weight, routed, product=product, gathered=gathered, out=out)
        num_pairs, rows = routed.pairs.size, self._expert_rows(weight, routed)
        features = rows // 2 if is_gated(activation) else rows
        _require(x.shape[0] == routed.experts.shape[0], "expert_up", x, routed.experts)
        _require(product.shape == (num_pairs, rows), "scratch of experts", product)
        _require(gathered.shape == (num_pairs, x.shape[1]), "scratch of experts", gathered)
        _require(out.shape == (num_pairs, features), "expert_up", out)
        if out.size:
            self._expert_up(x, weight, routed, activation, product, gathered, out)
        return out

    def expert_down(self, x: Tensor, weight: LinearWeight, routed: Routed, out: Tensor) -> Tensor:
        """out [P, N] = x [P, K], sorted by expert, times the weight of each row's expert, of [E * N, K]."""
        self._check_experts(x, weight, routed, out=out)
        shape = (routed.pairs.size, self._expert_rows(weight, routed))
        _require(x.shape[0] == shape[0] and out.shape == shape, "expert_down", x, out)
        if out.size:
            self._expert_down(x, weight, routed, out)
        return out

    def combine_experts(
        self,
        x: Tensor,
        routed: Routed,
        out: Tensor,
        *,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """out [T, H] = the sum of weights[t, i] * x[places[t * k + i]] in the order of i; x [P, H] sorted by expert.

        `shared` [T, H] is added, times sigmoid(shared_gate) where that is given, [T, 1] float32; with `accumulate` so
        is what `out` holds. The sum is rounded once.
        """
        self._check(x=x, out=out, shared=shared, shared_gate=shared_gate, **routed._asdict())
        num_tokens = routed.weights.shape[0]
        _require(x.ndim == 2 and x.shape[0] == routed.places.size, "combine_experts", x, routed.places)
        _require(x.dtype in FLOAT_DTYPES, "combine_experts", x)
        _require(out.shape == (num_tokens, x.shape[1]) and out.dtype == x.dtype, "combine_experts", out, x)
        if shared is not None:
            _require(shared.shape == out.shape and shared.dtype == x.dtype, "shared expert", shared, out)
        if shared_gate is not None:
            fits = shared_gate.shape == (num_tokens, 1) and shared_gate.dtype == float32
            _require(fits and shared is not None, "gate of the shared expert", shared_gate)
        if out.size:
            self._combine_experts(x, routed, shared, shared_gate, accumulate, out)
        return out

    def _check_experts(self, x: Tensor, weight: LinearWeight, routed: Routed, **others: Tensor) -> None:
        self._check(x=x, weight=weight, **routed._asdict(), **others)
        num_experts = routed.offsets.size - 1
        fits = x.ndim == 2 and x.shape[1] == weight.shape[1] and x.dtype in weight.activation_dtypes
        fits = fits and weight.order is None
        _require(
            fits and weight.shape[0] % num_experts == 0 and len(weight.parts) == 1, "product of experts", x, weight
        )
        for tensor in others.values():
            _require(tensor.ndim == 2 and tensor.dtype == x.dtype, "product of experts", tensor, x)

    @staticmethod
    def _expert_rows(weight: LinearWeight, routed: Routed) -> int:
        return weight.shape[0] // (routed.offsets.size - 1)

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _route(
        self, logits: Tensor, routing: Routing, out: Routed, bias: Tensor | None, correction: Tensor | None
    ) -> None: ...
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
        return False

    @abstractmethod
    def _expert_up(
        self,
        x: Tensor,
        weight: LinearWeight,
        routed: Routed,
        activation: Activation,
        product: Tensor,
        gathered: Tensor,
        out: Tensor,
    ) -> None: ...
    @abstractmethod
    def _expert_down(self, x: Tensor, weight: LinearWeight, routed: Routed, out: Tensor) -> None: ...
    @abstractmethod
    def _combine_experts(
        self,
        x: Tensor,
        routed: Routed,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        accumulate: bool,
        out: Tensor,
    ) -> None: ...
