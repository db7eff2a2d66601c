"""The blocks that forwards are made of: norms, and the halves of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from tessera.engine.collectives.interface import Collectives, LeftSum
from tessera.engine.formats import LinearWeight
from tessera.engine.models.buffers import Inner
from tessera.engine.models.specs import AttentionSpec, HalfNorms, LayerSpec, MLPSpec, NormSpec
from tessera.engine.models.weights.weights import AttentionWeights, HalfNormWeights, MLPWeights, NormWeights
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform, Ops
from tessera.engine.ops.linear_interface import Accumulate, Activate, AddedNorm, LayerNorm, Prologue, RMSNorm
from tessera.engine.tensor import Tensor, uint8

ACCUMULATE = Accumulate()
Left: TypeAlias = AddedNorm | LeftSum | None  # by the half before, to add to the stream


class LayerBuffers(Protocol):
    """What the blocks need of a forward's buffers."""

    normed: Tensor
    update: Tensor

    def inner(self, name: Inner, num_rows: int, width: int) -> Tensor: ...


@dataclass(frozen=True)
class Norm:
    """A norm with its weights."""

    spec: NormSpec
    weights: NormWeights

    def prologue(self, scratch: Tensor) -> Prologue:
        """For `Ops.linear`."""
        weight, bias = self.weights.weight, self.weights.bias
        if self.spec.kind == "rmsnorm":
            return RMSNorm(weight, self.spec.eps, scratch)
        return LayerNorm(weight, bias, self.spec.eps, scratch)

    def apply(self, ops: Ops, x: Tensor, out: Tensor) -> Tensor:
        """`out` may be x."""
        weight, bias = self.weights.weight, self.weights.bias
        if self.spec.kind == "rmsnorm":
            return ops.rmsnorm(x, weight, self.spec.eps, out=out)
        return ops.layernorm(x, weight, bias, self.spec.eps, out=out)


def make_norm(spec: NormSpec | None, weights: NormWeights | None) -> Norm | None:
    if spec is None:
        return None
    assert weights is not None, "a norm has a weight"
    return Norm(spec, weights)


class ResidualAdd:
    """The end of a half: its last product, and the addition to the stream."""

    def __init__(
        self,
        layer: LayerSpec,
        norms: HalfNorms,
        weights: HalfNormWeights,
        projection: LinearWeight | None,
        ops: Ops,
        ranks: Collectives | None,
        next_norm: Norm | None = None,
    ) -> None:
        """`projection`: the last product; None in a mixture of experts, which adds what it combined. `ranks`: that sum
        their updates. `next_norm`: of the stream, before the next half."""
        self._ops = ops
        self._projection = projection
        self._after = make_norm(norms.after, weights.after)
        self._of_sum = make_norm(norms.of_sum, weights.of_sum)
        self._multiplier = layer.residual_multiplier
        self._ranks = ranks
        self._adds_product = layer.adds_product(norms)
        self._adds_norm = layer.adds_norm(norms)
        self.fused = ranks is None and self._adds_product
        is_summed = ranks is not None and self._adds_product
        self._next_norm = (
            next_norm if next_norm is not None and next_norm.spec.kind == "rmsnorm" and is_summed else None
        )

    @property
    def has_normed(self) -> bool:
        """Whether `buffers.normed` is what the next half begins with, after `add`."""
        return self._next_norm is not None

    def leave(self, inner: Tensor, buffers: LayerBuffers) -> None:
        """The update alone, in `buffers.update`; `HalfInput.project` or `finish` adds its norm to the stream."""
        assert self._projection is not None, "a half without a last product adds its update"
        self._ops.linear(inner, self._projection, out=buffers.update[: inner.shape[0]])

    def left(self, buffers: LayerBuffers, stream: Tensor) -> AddedNorm:
        """The addition that `leave` deferred; its sum goes to `stream` [T, H]."""
        assert self._after is not None
        update = buffers.update[: stream.shape[0]]
        return AddedNorm(update, self._after.weights.weight, self._after.spec.eps, stream)

    def finish(self, before: Tensor, stream: Tensor, buffers: LayerBuffers) -> None:
        """stream [T, H] = what it was `before` + what `leave` left."""
        left = self.left(buffers, stream)
        self._ops.rmsnorm_add(left.update, left.weight, left.eps, stream=before, out=stream)

    def leave_to_ranks(self, inner: Tensor, half: int, buffers: LayerBuffers) -> None:
        """The update of one row, of whose sum over the ranks `left_to_ranks` tells the next half."""
        assert self._ranks is not None
        assert self._projection is not None
        self._ranks.leave_sum(inner, self._projection, half, buffers.update[: inner.shape[0]])

    def left_to_ranks(self, half: int, buffers: LayerBuffers, stream: Tensor) -> LeftSum:
        """The sum that `leave_to_ranks` left; with the stream before it, it goes to `stream` [1, H]."""
        assert self._ranks is not None
        return LeftSum(self._ranks, buffers.update[: stream.shape[0]], half, stream)

    def add(self, inner: Tensor, stream: Tensor, buffers: LayerBuffers) -> None:
        """stream [T, H] += the half whose product's input is `inner`."""
        ops = self._ops
        assert self._projection is not None, "a half without a last product adds its update"
        if self.fused:
            ops.linear(inner, self._projection, epilogue=ACCUMULATE, out=stream)
            return
        self.add_update(ops.linear(inner, self._projection, out=buffers.update[: inner.shape[0]]), stream, buffers)

    def add_update(self, update: Tensor, stream: Tensor, buffers: LayerBuffers) -> None:
        """stream [T, H] += what the half computed, in `buffers.update`; not where it is `fused`."""
        ops, ranks, norm = self._ops, self._ranks, self._next_norm
        if norm is not None:
            assert ranks is not None
            normed, weight = buffers.normed[: stream.shape[0]], norm.weights.weight
            if not ranks.all_reduce_add_norm(update, stream, weight, norm.spec.eps, out=normed):
                if not ranks.all_reduce_add(update, stream):
                    ranks.all_reduce(update)
                    ops.add(stream, update, out=stream)
                norm.apply(ops, stream, out=normed)
            return
        if ranks is not None:
            if self._adds_product and ranks.all_reduce_add(update, stream):
                return
            ranks.all_reduce(update)
        if self._adds_norm:
            assert self._after is not None
            ops.rmsnorm_add(update, self._after.weights.weight, self._after.spec.eps, out=stream)
        else:
            if self._after is not None:
                self._after.apply(ops, update, out=update)
            if self._multiplier != 1.0:
                ops.scale(update, self._multiplier, out=update)
            ops.add(stream, update, out=stream)
        if self._of_sum is not None:
            self._of_sum.apply(ops, stream, out=stream)


class HalfInput:
    """The begin of a half: the norm before its first product, which takes the stream."""

    def __init__(self, norm: Norm | None, projection: LinearWeight, ops: Ops, *, is_normed: bool = False) -> None:
        """`is_normed`: the half before has put the norm of the stream into `buffers.normed`."""
        self._norm = norm
        self._is_normed = is_normed
        self._projection = projection
        self._ops = ops

    def project(
        self,
        stream: Tensor,
        buffers: LayerBuffers,
        out: Tensor,
        activate: Activate | None = None,
        left: Left = None,
    ) -> Tensor:
        """`left`: what the half before left to add to the stream."""
        norm = self._norm
        if isinstance(left, LeftSum):
            assert norm is not None, "sums are left to a norm"
            function = None if activate is None else activate.function
            gain, eps = norm.weights.weight, norm.spec.eps
            left.ranks.project_sum(stream, left, gain, eps, self._projection, function, out)
            return out
        if self._is_normed:
            stream, norm = buffers.normed[: stream.shape[0]], None
        prologue = None if norm is None else norm.prologue(buffers.normed[: stream.shape[0]])
        if left is not None:
            assert isinstance(prologue, RMSNorm), "sums are left to an RMSNorm"
            prologue = replace(prologue, added=left)
        return self._ops.linear(stream, self._projection, prologue=prologue, epilogue=activate, out=out)


class NormInPlace:
    """Norms of queries and keys that have weights of their own for every head."""

    def __init__(self, spec: AttentionSpec, weights: AttentionWeights, ops: Ops, ranks: Collectives | None) -> None:
        """`ranks`: that share the heads."""
        assert spec.qk_norm is not None
        assert weights.q_norm is not None
        assert weights.k_norm is not None
        groups = (spec.num_heads, spec.num_kv_heads) if spec.qk_norm_form == "each_head" else (1, 1)
        self._parts = ((weights.q_norm, 0, groups[0]), (weights.k_norm, spec.q_size, groups[1]))
        self._norm = spec.qk_norm
        self._ops = ops
        self._ranks = ranks if spec.qk_norm_form == "width" else None

    def apply(self, qkv: Tensor, metadata: AttentionMetadata) -> None:
        centred = self._norm.kind == "layernorm"
        for weight, first, groups in self._parts:
            if self._ranks is not None:
                self._ranks.norm_columns(qkv, weight, self._norm.eps, first=first, centred=centred)
                continue
            self._ops.norm_columns(qkv, weight, self._norm.eps, first=first, groups=groups, centred=centred)


class RotationInPlace:
    """The rotation of queries and keys that pass their norms after it."""

    def __init__(self, spec: AttentionSpec, ops: Ops, cos_sin: Tensor) -> None:
        self._heads = spec.num_heads + spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._cos_sin = cos_sin
        self._ops = ops

    def apply(self, qkv: Tensor, metadata: AttentionMetadata) -> None:
        self._ops.rotate(qkv, self._cos_sin, metadata.positions, num_heads=self._heads, head_dim=self._head_dim)


def make_preparation(
    spec: AttentionSpec, weights: AttentionWeights, ops: Ops, cos_sin: Tensor | None, ranks: Collectives | None
) -> NormInPlace | RotationInPlace | None:
    """The norm or rotation of queries and keys that comes before `HeadTransform`; None where there is none."""
    if spec.qk_norm is None or spec.qk_norm_form == "head":
        return None
    if spec.qk_norm_form == "rotated_head":
        return None if cos_sin is None else RotationInPlace(spec, ops, cos_sin)
    return NormInPlace(spec, weights, ops, ranks)


class CausalAttention:
    """softmax(q k^T) v over the paged KV cache; letters as in `tessera.engine.ops.interface`."""

    def __init__(
        self,
        spec: AttentionSpec,
        weights: AttentionWeights,
        ops: Ops,
        cache: tuple[Tensor, Tensor],
        cos_sin: Tensor | None,
        ranks: Collectives | None = None,
        *,
        is_normed: bool = False,
    ) -> None:
        """`ranks`: that share the heads; `spec` and the weights are this one's. `is_normed`: see `HalfInput`."""
        self._spec = spec
        self._ops = ops
        self._keys, self._values = cache
        self._sinks = weights.sinks
        self._kv_scales = weights.kv_scales if self._keys.dtype == uint8 else None
        norm = make_norm(spec.norms.before, weights.norms.before)
        self._input = HalfInput(norm, weights.qkv, ops, is_normed=is_normed)
        self._prepare = make_preparation(spec, weights, ops, cos_sin, ranks)
        angles = None if isinstance(self._prepare, RotationInPlace) else cos_sin
        if spec.qk_norm is None or isinstance(self._prepare, NormInPlace):
            self._transform = HeadTransform(angles, None, None, 0.0)
        else:
            self._transform = HeadTransform(angles, weights.q_norm, weights.k_norm, spec.qk_norm.eps)

    def attend(self, stream: Tensor, metadata: AttentionMetadata, buffers: LayerBuffers, left: Left = None) -> Tensor:
        """Stores the keys and values of stream [T, H]; returns [T, Hq * D]. `left`: see `HalfInput.project`."""
        spec, num_tokens = self._spec, stream.shape[0]
        return self._ops.attention(
            self._qkv(stream, metadata, buffers, left),
            self._keys,
            self._values,
            metadata,
            self._transform,
            num_heads=spec.num_heads,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            sinks=self._sinks,
            kv_scales=self._kv_scales,
            queries=buffers.inner("queries", num_tokens, spec.q_size),
            out=buffers.inner("attended", num_tokens, spec.q_size),
        )

    def attend_chosen(
        self,
        stream: Tensor,
        metadata: AttentionMetadata,
        chosen: Tensor,
        last: AttentionMetadata,
        buffers: LayerBuffers,
        left: Left = None,
    ) -> Tensor:
        """As `attend`, but the result [S, Hq * D] of the tokens `chosen` [S] alone, which `last` describes."""
        ops, spec, num_chosen = self._ops, self._spec, chosen.shape[0]
        queries = ops.rope_and_store(
            self._qkv(stream, metadata, buffers, left),
            self._keys,
            self._values,
            metadata,
            self._transform,
            num_heads=spec.num_heads,
            kv_scales=self._kv_scales,
            out=buffers.inner("queries", stream.shape[0], spec.q_size),
        )
        return ops.paged_attention(
            ops.embedding(chosen, queries, out=buffers.inner("last_queries", num_chosen, spec.q_size)),
            self._keys,
            self._values,
            last,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            sinks=self._sinks,
            kv_scales=self._kv_scales,
            out=buffers.inner("attended", num_chosen, spec.q_size),
        )

    def _qkv(self, stream: Tensor, metadata: AttentionMetadata, buffers: LayerBuffers, left: Left) -> Tensor:
        qkv = buffers.inner("qkv", stream.shape[0], self._spec.qkv_size)
        self._input.project(stream, buffers, qkv, left=left)
        if self._prepare is not None:
            self._prepare.apply(qkv, metadata)
        return qkv


class MLP:
    """The activation of the up projection; a `ResidualAdd` projects it down.

    Attributes: up, down: its products. activation: between them.
    """

    def __init__(
        self, spec: MLPSpec, weights: MLPWeights, ops: Ops, norm: Norm | None, *, is_normed: bool = False
    ) -> None:
        """`norm` before it; `is_normed`: see `HalfInput`."""
        self._spec = spec
        self._input = HalfInput(norm, weights.up, ops, is_normed=is_normed)
        self.up, self.down, self.activation = weights.up, weights.down, spec.activation

    def activate(self, stream: Tensor, buffers: LayerBuffers, left: Left = None) -> Tensor:
        """stream [T, H] -> [T, I]; `left`: see `HalfInput.project`."""
        spec, num_tokens = self._spec, stream.shape[0]
        activate = Activate(spec.activation, buffers.inner("up", num_tokens, spec.up_size), self.down)
        out = buffers.inner("activated", num_tokens, spec.inner_size)
        return self._input.project(stream, buffers, out, activate, left)
