"""The one decoder forward: embedding, layers that add to a residual stream, final norm, head.

Nothing is allocated and nothing crosses between host and device inside `forward`: every result goes
to memory made beforehand, so that a whole step can be captured and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tessera.engine.collectives.interface import Collectives, SummedHalf
from tessera.engine.formats import AdapterRows, AdapterSelection
from tessera.engine.models.blocks import MLP, CausalAttention, Left, Norm, ResidualAdd, make_norm
from tessera.engine.models.buffers import StepBuffers
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.mixture.mixture import Mixture
from tessera.engine.models.offload.layer_stream import LayerStream
from tessera.engine.models.rope_tables import RopeTables
from tessera.engine.models.specs import LayerSpec, MoESpec
from tessera.engine.models.weights.weights import LayerWeights, MLPWeights, MoEWeights, Weights
from tessera.engine.ops.interface import AttentionMetadata, Ops
from tessera.engine.tensor import Tensor

Tap = Callable[[Tensor, AttentionMetadata], None]  # of a stream [T, H]
ATTENTION, MLP_HALF = 0, 1  # of a layer
LayerCache = tuple[Tensor, Tensor]  # keys and values [num_blocks, Hkv, block_size, D]


class StepAdapters(NamedTuple):
    """The adapters of a step's tokens, and of those that logits are made of."""

    tokens: AdapterRows
    chosen: AdapterRows


class Decoder:
    """A model ready to run."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        caches: Sequence[LayerCache],
        rope_tables: RopeTables,
        *,
        ranks: Collectives | None = None,
        first_token: int = 0,
        num_tokens: int = 0,
        leaves_sums: bool = False,
        selection: AdapterSelection | None = None,
    ) -> None:
        """`caches`: of each layer. `rope_tables`: of `config.ropes`. `selection`: of weights with adapters.

        `ranks` share the model: `config` and `weights` are this one's, whose rows of embedding and head begin with
        `first_token` of `num_tokens`. The step's buffers must be made for it. `leaves_sums`: the sums of one row may be
        left to the products behind them; all ranks make their decoders at the same time.
        """
        self.config = config
        self.weights = weights
        self.ops = ops
        self.caches = caches
        self.rope_tables = rope_tables
        self._selection = selection
        self._ranks, self._first_token, self._num_tokens = ranks, first_token, num_tokens
        firsts = [
            make_norm(spec.attention.norms.before, layer.attention.norms.before)
            for spec, layer in zip(config.layers, weights.layers, strict=True)
        ]
        parts = zip(config.layers, weights.layers, caches, [*firsts[1:], None], strict=True)
        layers: list[DecoderLayer] = []
        for spec, layer, cache, next_norm in parts:
            is_normed = bool(layers) and layers[-1].has_normed
            tables = rope_tables.tables
            made = DecoderLayer(spec, layer, ops, cache, tables, ranks, next_norm, is_normed=is_normed)
            if layers and weights.stream is None:
                layers[-1].leave_sum_to(made)
            layers.append(made)
        if ranks is not None and leaves_sums and weights.stream is None:
            leave_sums_to_ranks(ranks, layers)
        self._output_tap: Tap | None = None
        self._stream = weights.stream
        self._layers: list[DecoderLayer | StreamedLayer | TappedLayer] = [*layers]
        if self._stream is not None:
            for number, index in enumerate(self._stream.indices):
                self._layers[index] = StreamedLayer(layers[index], self._stream, number)
        final_norm = make_norm(config.final_norm, weights.final_norm)
        assert final_norm is not None, "a decoder ends with a norm"
        assert weights.lm_head is not None, "a decoder has a head"
        self._final_norm, self._lm_head = final_norm, weights.lm_head
        self._embedding_multiplier = config.embedding_multiplier
        if config.embedding_rounded:
            dtype = final_norm.weights.weight.dtype
            self._embedding_multiplier = float(np.float32(config.embedding_multiplier).astype(dtype))

    def tap(self, index: int, tap: Tap) -> None:
        """Have every later forward call `tap` with the stream before layer `index`, or after the last layer, which then
        computes every token."""
        if index == len(self._layers):
            self._output_tap = tap
        else:
            layer = self._layers[index]
            if isinstance(layer, DecoderLayer):  # of others nothing is left
                layer.finish_stream_before()
            self._layers[index] = TappedLayer(layer, tap)

    def forward(
        self,
        input_ids: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | None,
        buffers: StepBuffers,
        *,
        sampled: Tensor | None = None,
        last: AttentionMetadata | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Store this step's keys and values, return logits [S, V] float32 of the tokens chosen by
        `logits_indices` [S] int32 among input_ids [T] int32 (None: of all). A negative id -1 - n stands
        for sampled[n]. The result lives in `buffers` until the next step.

        `last` describes the chosen tokens as S rows of one query each. With it the last layer computes
        nothing of others but their keys and values, and `project` cannot be asked for others afterwards.
        """
        self._select(None if adapters is None else adapters.tokens)
        stream = self._embed(input_ids, metadata, buffers, sampled)
        if last is not None and self._output_tap is None:
            assert logits_indices is not None, "`last` describes chosen tokens"
            for layer in self._layers[:-1]:
                layer.forward(stream, metadata, buffers)
            attended, stream = self._layers[-1].attend_chosen(stream, metadata, logits_indices, last, buffers)
            self._select(None if adapters is None else adapters.chosen)
            self._layers[-1].add_halves(attended, stream, buffers)
            return self._logits(stream, buffers)
        for layer in self._layers:
            layer.forward(stream, metadata, buffers)
        if self._output_tap is not None:
            self._output_tap(stream, metadata)
        return self._logits(stream, buffers) if logits_indices is None else self.project(logits_indices, buffers)

    def project(self, logits_indices: Tensor, buffers: StepBuffers) -> Tensor:
        """Logits [S, V] float32 of tokens of the step that `buffers` is from, as `forward` gives them; they
        take the place of the last ones."""
        chosen = buffers.last_residual[: logits_indices.shape[0]]
        return self._logits(self.ops.embedding(logits_indices, buffers.residual, out=chosen), buffers)

    def gather(self, logits: Tensor, buffers: StepBuffers) -> Tensor:
        """Logits [S, V] of the whole vocabulary on rank 0, of those that each rank has; on others nothing of use."""
        if self._ranks is None:
            return logits
        everything = buffers.logits[: logits.shape[0]]
        out = everything if self._ranks.index == 0 else None
        self._ranks.gather_columns(logits, out, first=self._first_token, whole=self._num_tokens)
        return everything

    def hidden_states(self, input_ids: Tensor, metadata: AttentionMetadata, buffers: StepBuffers) -> Tensor:
        """As `forward`, but the final norm's output [T, H] of every token instead of logits."""
        self._select(None)
        stream = self._embed(input_ids, metadata, buffers, None)
        for layer in self._layers:
            layer.forward(stream, metadata, buffers)
        return self._final_norm.apply(self.ops, stream, out=buffers.normed[: input_ids.shape[0]])

    def _select(self, rows: AdapterRows | None) -> None:
        """Adapters of the rows of the products that come next."""
        if self._selection is not None:
            self._selection.rows = rows

    def _embed(
        self, input_ids: Tensor, metadata: AttentionMetadata, buffers: StepBuffers, sampled: Tensor | None
    ) -> Tensor:
        """The residual stream [T, H] before the first layer."""
        ops, weights, num_tokens = self.ops, self.weights, input_ids.shape[0]
        if self._stream is not None:
            self._stream.begin()
        stream, ranks, factor = buffers.residual[:num_tokens], self._ranks, self._embedding_multiplier
        if ranks is None:
            ops.lookup(input_ids, weights.embedding, sampled=sampled, factor=factor, out=stream)
        else:
            own = ranks.own_ids(input_ids, sampled, self._first_token, buffers.inner("own_ids", 1, num_tokens)[0])
            ops.lookup(own, weights.embedding, factor=factor, out=stream)
            ranks.all_reduce(stream)  # of zeros but for one
        if weights.position_embedding is not None:
            position = ops.lookup(metadata.positions, weights.position_embedding, out=buffers.normed[:num_tokens])
            ops.add(stream, position, out=stream)
        return stream

    def _logits(self, stream: Tensor, buffers: StepBuffers) -> Tensor:
        """Of at most `max_logits` rows [S, H] of the residual stream -> [S, V] float32 in `buffers`.

        Where ranks share the head, each has its own.
        """
        ops, config, num_logits = self.ops, self.config, stream.shape[0]
        prologue = self._final_norm.prologue(buffers.last_normed[:num_logits])
        logits = ops.linear(stream, self._lm_head, prologue=prologue, out=buffers.own_logits[:num_logits])
        if config.logits_multiplier != 1.0:
            ops.scale(logits, config.logits_multiplier, out=logits)
        if config.logits_soft_cap is not None:
            ops.soft_cap(logits, config.logits_soft_cap, out=logits)
        return logits


def leave_sums_to_ranks(ranks: Collectives, layers: Sequence[DecoderLayer]) -> None:
    """Leave the sums of one row over the ranks to the products behind them, where all layers can.

    Not those of the last layer, whose stream is complete when it ends.
    """
    halves = [layer.summed_halves(after) for layer, after in pairwise(layers)]
    if halves and all(halves) and ranks.leaves_sums([half for each in halves for half in each]):
        for layer, after in pairwise(layers):
            layer.leave_sums_over_ranks(after)


class DecoderLayer:
    """Attention and MLP, one after the other or side by side."""

    def __init__(
        self,
        spec: LayerSpec,
        weights: LayerWeights,
        ops: Ops,
        cache: LayerCache,
        rope_tables: Sequence[Tensor],
        ranks: Collectives | None,
        next_norm: Norm | None,
        *,
        is_normed: bool,
    ) -> None:
        """`next_norm`: of the next layer; `is_normed`: see `HalfInput`."""
        attention, mlp = spec.attention, spec.mlp
        self._weights = weights
        cos_sin = None if attention.rope is None else rope_tables[attention.rope]
        mlp_norm = make_norm(mlp.norms.before, weights.mlp.norms.before)
        if spec.parallel and mlp_norm is None:
            mlp_norm = make_norm(attention.norms.before, weights.attention.norms.before)
        self._ops = ops
        self._parallel = spec.parallel
        self._leaves_sum = ranks is None and spec.leaves_sum  # of attention's half, to the MLP
        self._before: DecoderLayer | None = None  # whose MLP's half is left to this one
        self._leaves_mlp_sum = False  # to the next layer
        self._leaves_rank_sums = False  # of one row, over the ranks
        self._after_rank_sum: DecoderLayer | None = None  # whose MLP's half is left to this one, of one row
        self._adds_to_norm = attention.norms.before is not None and attention.norms.before.kind == "rmsnorm"
        self._attention = CausalAttention(attention, weights.attention, ops, cache, cos_sin, ranks, is_normed=is_normed)
        after_attention = None if spec.parallel else mlp_norm
        self._attention_add = ResidualAdd(
            spec, attention.norms, weights.attention.norms, weights.attention.out, ops, ranks, after_attention
        )
        mlp_is_normed = self._attention_add.has_normed
        self._mlp: MLP | Mixture
        if isinstance(mlp, MoESpec):
            assert isinstance(weights.mlp, MoEWeights), "a mixture has weights of experts"
            add = ResidualAdd(spec, mlp.norms, weights.mlp.norms, None, ops, ranks, next_norm)
            self._mlp = Mixture(mlp, weights.mlp, ops, mlp_norm, add, is_normed=mlp_is_normed)
        else:
            assert isinstance(weights.mlp, MLPWeights), "an MLP has its weights"
            self._mlp = MLP(mlp, weights.mlp, ops, mlp_norm, is_normed=mlp_is_normed)
            add = ResidualAdd(spec, mlp.norms, weights.mlp.norms, weights.mlp.down, ops, ranks, next_norm)
            self._mlp_add = add
        self.has_normed = add.has_normed

    def leave_sum_to(self, after: DecoderLayer) -> None:
        """Leave this layer's last sum to the first product of the layer `after` it, where both can."""
        if self._leaves_sum and after._adds_to_norm:
            self._leaves_mlp_sum, after._before = True, self

    def finish_stream_before(self) -> None:
        """Have the layer before leave nothing to this one."""
        if self._before is not None:
            self._before._leaves_mlp_sum, self._before = False, None
        if self._after_rank_sum is not None:
            self._after_rank_sum._leaves_rank_sums, self._after_rank_sum = False, None

    def summed_halves(self, after: DecoderLayer) -> list[SummedHalf]:
        """The products around this layer's sums over the ranks; none where they are not an RMSNorm's input."""
        mlp = self._mlp
        if self._parallel or isinstance(mlp, Mixture) or not (self._attention_add.has_normed and self.has_normed):
            return []
        return [
            SummedHalf(self._weights.attention.out, mlp.up, mlp.activation),
            SummedHalf(mlp.down, after._weights.attention.qkv, None),
        ]

    def leave_sums_over_ranks(self, after: DecoderLayer) -> None:
        """Leave this layer's sums of one row to its MLP, and to the layer `after` it."""
        self._leaves_rank_sums, after._after_rank_sum = True, self

    def forward(self, stream: Tensor, metadata: AttentionMetadata, buffers: StepBuffers) -> None:
        """stream [T, H] becomes the layer's output, but for what it leaves to the next layer."""
        x, left = self._input(stream, buffers)
        self.add_halves(self._attention.attend(x, metadata, buffers, left), stream, buffers)

    def _input(self, stream: Tensor, buffers: StepBuffers) -> tuple[Tensor, Left]:
        """The first product's input, and the deferred addition before it, whose sum `stream` is the layer's input."""
        if self._after_rank_sum is not None and stream.shape[0] == 1:
            left = self._after_rank_sum._mlp_add.left_to_ranks(MLP_HALF, buffers, stream)
            return buffers.half_residual[:1], left
        if self._before is None:
            return stream, None
        return buffers.half_residual[: stream.shape[0]], self._before._mlp_add.left(buffers, stream)

    def attend_chosen(
        self, stream: Tensor, metadata: AttentionMetadata, chosen: Tensor, last: AttentionMetadata, buffers: StepBuffers
    ) -> tuple[Tensor, Tensor]:
        """For the tokens `chosen` [S] alone, which `last` describes: what attention gives, and their rows of the stream
        [S, H], which `add_halves` makes the layer's output."""
        x, left = self._input(stream, buffers)
        attended = self._attention.attend_chosen(x, metadata, chosen, last, buffers, left)
        return attended, self._ops.embedding(chosen, stream, out=buffers.last_residual[: chosen.shape[0]])

    def add_halves(self, attended: Tensor, stream: Tensor, buffers: StepBuffers) -> None:
        """stream [T, H] becomes the layer's output, after what attention gave."""
        if isinstance(self._mlp, Mixture):
            self._attention_add.add(attended, stream, buffers)
            self._mlp.add(stream, buffers)
            return
        if self._leaves_rank_sums and stream.shape[0] == 1:
            between = buffers.half_residual[:1]
            self._attention_add.leave_to_ranks(attended, ATTENTION, buffers)
            left = self._attention_add.left_to_ranks(ATTENTION, buffers, between)
            self._mlp_add.leave_to_ranks(self._mlp.activate(stream, buffers, left), MLP_HALF, buffers)
            return
        if self._leaves_sum:
            between = buffers.half_residual[: stream.shape[0]]
            self._attention_add.leave(attended, buffers)
            activated = self._mlp.activate(stream, buffers, self._attention_add.left(buffers, between))
            self._mlp_add.leave(activated, buffers)
            if not self._leaves_mlp_sum:
                self._mlp_add.finish(between, stream, buffers)
            return
        if self._parallel:
            activated = self._mlp.activate(stream, buffers)
            self._attention_add.add(attended, stream, buffers)
        else:
            self._attention_add.add(attended, stream, buffers)
            activated = self._mlp.activate(stream, buffers)
        self._mlp_add.add(activated, stream, buffers)


class StreamedLayer:
    """A layer whose weights come to the device during the forward."""

    def __init__(self, layer: DecoderLayer, stream: LayerStream, number: int) -> None:
        """`number`: the layer's place in `stream.indices`."""
        self._layer = layer
        self._stream = stream
        self._number = number

    def forward(self, stream: Tensor, metadata: AttentionMetadata, buffers: StepBuffers) -> None:
        """As `DecoderLayer.forward`."""
        self._stream.hold_step(self._number)
        self._layer.forward(stream, metadata, buffers)
        self._stream.release(self._number)

    def attend_chosen(
        self, stream: Tensor, metadata: AttentionMetadata, chosen: Tensor, last: AttentionMetadata, buffers: StepBuffers
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.attend_chosen`; `add_halves` follows."""
        self._stream.hold_step(self._number)
        return self._layer.attend_chosen(stream, metadata, chosen, last, buffers)

    def add_halves(self, attended: Tensor, stream: Tensor, buffers: StepBuffers) -> None:
        """As `DecoderLayer.add_halves`, after `attend_chosen`."""
        self._layer.add_halves(attended, stream, buffers)
        self._stream.release(self._number)


class TappedLayer:
    """A layer whose input something else reads."""

    def __init__(self, layer: DecoderLayer | StreamedLayer | TappedLayer, tap: Tap) -> None:
        self._layer = layer
        self._tap = tap

    def forward(self, stream: Tensor, metadata: AttentionMetadata, buffers: StepBuffers) -> None:
        """As `DecoderLayer.forward`."""
        self._tap(stream, metadata)
        self._layer.forward(stream, metadata, buffers)

    def attend_chosen(
        self, stream: Tensor, metadata: AttentionMetadata, chosen: Tensor, last: AttentionMetadata, buffers: StepBuffers
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.attend_chosen`; `add_halves` follows."""
        self._tap(stream, metadata)
        return self._layer.attend_chosen(stream, metadata, chosen, last, buffers)

    def add_halves(self, attended: Tensor, stream: Tensor, buffers: StepBuffers) -> None:
        """As `DecoderLayer.add_halves`, after `attend_chosen`."""
        self._layer.add_halves(attended, stream, buffers)
