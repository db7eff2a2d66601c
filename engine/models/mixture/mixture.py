"""The forward of a mixture of experts: router, the chosen experts' MLPs, the weighted sum of their outputs."""

from __future__ import annotations

from tessera.engine.models.blocks import MLP, LayerBuffers, Norm, ResidualAdd
from tessera.engine.models.specs import MoESpec
from tessera.engine.models.weights.weights import MoEWeights
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import RMSNorm
from tessera.engine.ops.moe_interface import Routed
from tessera.engine.tensor import Tensor


class Mixture:
    """Letters: T tokens, k experts of each, P = T * k pairs, E experts."""

    def __init__(
        self,
        spec: MoESpec,
        weights: MoEWeights,
        ops: Ops,
        norm: Norm | None,
        add: ResidualAdd,
        *,
        is_normed: bool = False,
    ) -> None:
        """`norm` before it; `add` adds what the mixture computed to the stream. `is_normed`: see `HalfInput`."""
        self._spec = spec
        self._weights = weights
        self._ops = ops
        self._norm, self._is_normed = norm, is_normed
        self._add = add
        self._shared = None
        if spec.shared is not None:
            assert weights.shared is not None, "a shared expert has weights"
            self._shared = MLP(spec.shared, weights.shared, ops, None)

    def add(self, stream: Tensor, buffers: LayerBuffers) -> None:
        """stream [T, H] += the mixture of it."""
        ops, spec, weights, num_tokens = self._ops, self._spec, self._weights, stream.shape[0]
        x, routed = self._route(stream, buffers)
        num_pairs, hidden = num_tokens * spec.routing.top_k, x.shape[1]
        activated = ops.expert_up(
            x,
            weights.up,
            routed,
            spec.activation,
            product=buffers.inner("expert_up", num_pairs, spec.up_size),
            gathered=buffers.inner("expert_rows", num_pairs, hidden),
            out=buffers.inner("expert_activated", num_pairs, spec.inner_size),
        )
        outputs = ops.expert_down(activated, weights.down, routed, out=buffers.inner("expert_rows", num_pairs, hidden))
        shared, gate = self._shared_output(x, buffers)
        fused = self._add.fused
        target = stream if fused else buffers.update[:num_tokens]
        ops.combine_experts(outputs, routed, target, shared=shared, shared_gate=gate, accumulate=fused)
        if not fused:
            self._add.add_update(target, stream, buffers)

    def _route(self, stream: Tensor, buffers: LayerBuffers) -> tuple[Tensor, Routed]:
        """The rows that the experts take, normed, and the experts of each."""
        ops, spec, weights, num_tokens = self._ops, self._spec, self._weights, stream.shape[0]
        top_k, num_experts = spec.routing.top_k, spec.num_experts
        routed = Routed(
            buffers.inner("experts", num_tokens, top_k),
            buffers.inner("expert_weights", num_tokens, top_k),
            buffers.inner("expert_offsets", 1, num_experts + 1)[0],
            buffers.inner("expert_pairs", 1, num_tokens * top_k)[0],
            buffers.inner("expert_places", 1, num_tokens * top_k)[0],
        )
        x = stream if self._norm is None else buffers.normed[:num_tokens]
        norm = None
        if self._norm is not None and not self._is_normed:
            prologue = self._norm.prologue(x)
            norm = prologue if isinstance(prologue, RMSNorm) else None
            if norm is None:
                self._norm.apply(ops, stream, out=x)
        rows = x if norm is None else stream
        bias, correction = weights.router_bias, weights.correction
        if not ops.route_rows(rows, weights.router, spec.routing, routed, norm=norm, bias=bias, correction=correction):
            if norm is not None:
                ops.rmsnorm(stream, norm.weight, norm.eps, out=x)
            logits = ops.linear(x, weights.router, out=buffers.inner("router_logits", num_tokens, num_experts))
            ops.route(logits, spec.routing, routed, bias=bias, correction=correction)
        return x, routed

    def _shared_output(self, x: Tensor, buffers: LayerBuffers) -> tuple[Tensor | None, Tensor | None]:
        """The shared expert's output [T, H], and the number [T, 1] whose sigmoid it is multiplied by."""
        if self._shared is None:
            return None, None
        ops, weights, num_tokens = self._ops, self._weights, x.shape[0]
        assert weights.shared is not None
        activated = self._shared.activate(x, buffers)
        shared = ops.linear(activated, weights.shared.down, out=buffers.inner("shared", num_tokens, x.shape[1]))
        if weights.shared_gate is None:
            return shared, None
        gate = buffers.inner("shared_gate", num_tokens, 1)
        return shared, ops.linear(x, weights.shared_gate, out=gate)
