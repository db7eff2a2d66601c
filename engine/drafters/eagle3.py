"""An EAGLE-3 head: one layer that drafts from the served model's hidden states (Li et al. 2025; see `eagle3_config`).

The served model leaves a feature of each of its tokens in a part of the KV cache: what `fc` makes of three of its
hidden states. Entry p of the head reads feature p and the embedding of token p + 1, attends to the entries up to its
own, and says token p + 2. For want of a feature, its next step reads the hidden state that it had itself. Its most
likely tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.drafters.eagle3_config import NUM_FEATURES, Eagle3Config
from tessera.engine.drafters.eagle3_weights import Eagle3Weights, dummy_eagle3, load_eagle3
from tessera.engine.models.blocks import ACCUMULATE
from tessera.engine.models.kv_cache import KVCache
from tessera.engine.models.specs import MLPSpec
from tessera.engine.models.weights.weights import MLPWeights, NormWeights, Weights
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform, Ops
from tessera.engine.ops.linear_interface import Activate, RMSNorm
from tessera.engine.runner.model_runner import ModelRunner, Progress, RunningStep
from tessera.engine.runner.step_inputs import StepInputs
from tessera.engine.runner.upload import StepUpload, aligned
from tessera.engine.speculation.draft_keys import DraftLimits
from tessera.engine.tensor import Buffer, CpuDevice, Device, Tensor, empty, float32, int32

SHIFT = 1  # an entry reads the token behind its own
NOT_ROTATED = HeadTransform(None, None, None, 0.0)


class Eagle3(DraftModel):
    """Runs a head; see `DraftRunner`.

    Features lie in blocks as keys and values do, a half of each feature as keys and a half as values of as many heads:
    what stores keys stores them, and what looks up embeddings reads them.
    """

    def __init__(self, config: EngineConfig, head: Eagle3Config, device: Device, ops: Ops) -> None:
        super().__init__(config, head.model, device, ops)
        self._head = head
        self._spec = head.model.layers[0].attention
        self._following: list[int] = []  # of each sampled sequence, the place that its next step reads; -1: none
        self._num_halves = head.model.hidden_size // (2 * self._spec.head_dim)  # heads that hold half a feature

    @property
    def planned_bytes(self) -> int:
        hidden = self.model.hidden_size
        extra = (self._spec.qkv_size + NUM_FEATURES * hidden) * hidden * self._dtype.itemsize
        return super().planned_bytes + extra

    @property
    def block_bytes(self) -> int:
        return super().block_bytes + self.block_size * self.model.hidden_size * self._dtype.itemsize

    @property
    def limits(self) -> DraftLimits:
        return replace(super().limits, shift=SHIFT)

    @property
    def scratch(self) -> list[Buffer]:
        return [self._buffers.buffer, self.kv_cache.planes[0].buffer, self._features.buffer]

    def load(self, served: ModelRunner, progress: Progress | None) -> None:
        self._served_embedding = served.weights.embedding
        self._served_vocab = served.model.vocab_size
        super().load(served, progress)
        eagle, hidden = self._eagle, self.model.hidden_size
        if not isinstance(self.device, CpuDevice):
            self._cuda_ops.reserve_linear(eagle.extra(), self._dtype, max(self._buffer_tokens, served.max_step_tokens))
        own = eagle.layers.embedding is not self._served_embedding
        shared = 0 if own else sum(tensor.nbytes for tensor in self._served_embedding.tensors())
        self.weight_bytes = eagle.nbytes - shared
        self.num_parameters = eagle.num_parameters - (0 if own else self._served_embedding.num_parameters)
        self._combined = empty((served.max_step_tokens, hidden), self._dtype, self.device)
        self._embedded = empty((self._buffer_tokens, hidden), self._dtype, self.device)
        self._named = empty((self.config.max_num_seqs, 1), float32, self.device)
        num_rows = self._buffer_tokens * 2 * self._num_halves
        first_row = aligned(self.config.max_num_seqs * int32.itemsize)
        self._places = StepUpload(self.device, first_row + aligned(num_rows * int32.itemsize))
        self._next_places = Tensor(self._places.buffer, (self.config.max_num_seqs,), int32, 0)
        self._feature_rows = Tensor(self._places.buffer, (num_rows,), int32, first_row)

    def _load_weights(self, progress: Progress | None) -> Weights:
        self._eagle = self._read_weights()
        return self._eagle.layers

    def _read_weights(self) -> Eagle3Weights:
        if self.config.load_format == "dummy":
            return dummy_eagle3(self._head, self._dtype, self.device, self._served_embedding, self.config.seed or 0)
        return load_eagle3(self._head, self._dtype, self.device, self._served_embedding, self._served_vocab)

    def _allocate(self, num_kv_blocks: int) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.kv_cache = KVCache(self._own, num_kv_blocks, self.block_size, self._kv_format, self.device)
        shape = (2, num_kv_blocks, self._num_halves, self.block_size, self._spec.head_dim)
        self._features = empty(shape, self._dtype, self.device)
        self.kv_cache_bytes = self.kv_cache.nbytes + self._features.nbytes

    def allocate(self, served: ModelRunner) -> None:
        super().allocate(served)
        layers = self._head.feature_layers
        for layer in sorted(set(layers)):
            parts = [part for part, each in enumerate(layers) if each == layer]
            served.decoder.tap(layer, partial(self._combine, parts))

    # -- a step of the served model -------------------------------------------------------------

    def _combine(self, parts: list[int], stream: Tensor, metadata: AttentionMetadata) -> None:
        """Add what these parts of `fc` make of the stream [T, H]; with the last part the features are there."""
        combined = self._combined[: stream.shape[0]]
        for part in parts:
            epilogue = ACCUMULATE if part else None
            self.ops.linear(stream, self._eagle.combine[part], epilogue=epilogue, out=combined)
        if NUM_FEATURES - 1 in parts:
            self._store(combined, metadata)

    def _store(self, features: Tensor, metadata: AttentionMetadata) -> None:
        """features [T, H] in the places that `metadata` has for keys."""
        keys, values = self._features[0], self._features[1]
        self.ops.rope_and_store(features, keys, values, metadata, NOT_ROTATED, num_heads=0)

    # -- a step of the head ---------------------------------------------------------------------

    def _prepare(self, step: StepBatch, later: Sequence[StepBatch]) -> None:
        step.sampling.rows["temperature"] = 0.0  # its tokens have other numbers, so chance chooses others
        following = (
            dict(zip(later[0].table_rows.tolist(), later[0].slot_mapping.tolist(), strict=True)) if later else {}
        )
        self._following = [following.get(slot, -1) for slot in step.sampling.slots.tolist()]

    def _submit(self, inputs: StepInputs, batch: StepBatch) -> None:
        """Also send where features are, and where hidden states that stand for features go."""
        places = np.full(self._next_places.size, -1, np.int32)
        following = self._following if batch.num_sampled == len(self._following) else []
        places[: len(following)] = following
        slots = np.full(inputs.shape.num_tokens, -1, np.int32)
        slots[: batch.num_tokens] = batch.slot_mapping
        self._places.stage_array(places)
        self._places.stage_array(self._rows_of(slots))
        self._places.submit()
        super()._submit(inputs, batch)

    def _rows_of(self, slots: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The rows of `_features`, seen as rows of a head, of the features in these slots; -1 of slots below 0."""
        blocks, offsets = np.divmod(slots, self.block_size)
        heads = np.arange(self._num_halves, dtype=np.int32)
        keys = (blocks[:, None] * self._num_halves + heads) * self.block_size + offsets[:, None]
        values = keys + self.num_kv_blocks * self._num_halves * self.block_size
        rows = np.concatenate([keys, values], axis=1)
        rows[slots < 0] = -1
        return rows.ravel().astype(np.int32)

    def _forward(self, inputs: StepInputs, *, every_token: bool = False, adapted: bool = False) -> Tensor:
        ops, buffers, spec, shape = self.ops, self._buffers, self._spec, inputs.shape
        layer, eagle, num_tokens = self._eagle.layers.layers[0], self._eagle, inputs.shape.num_tokens
        mlp = self.model.layers[0].mlp
        assert isinstance(mlp, MLPSpec)
        assert isinstance(layer.mlp, MLPWeights)
        ops.scatter(self._block_tables, *inputs.updates)
        hidden, scratch = buffers.residual[:num_tokens], buffers.normed[:num_tokens]
        rows = self._feature_rows[: num_tokens * 2 * self._num_halves]
        table = self._features.view(self._features.size // spec.head_dim, spec.head_dim)
        ops.embedding(rows, table, out=hidden.view(rows.size, spec.head_dim))
        embedded = ops.lookup(
            inputs.input_ids, eagle.layers.embedding, sampled=self._newest, out=self._embedded[:num_tokens]
        )
        qkv = buffers.inner("qkv", num_tokens, spec.qkv_size)
        norm = self._norm(layer.attention.norms.before, scratch)
        ops.linear(embedded, layer.attention.qkv, prologue=norm, out=qkv)
        norm = RMSNorm(eagle.feature_norm, self._eps, scratch)
        ops.linear(hidden, eagle.feature_qkv, prologue=norm, epilogue=ACCUMULATE, out=qkv)
        if self._head.norm_before_residual:
            ops.rmsnorm(hidden, eagle.feature_norm, self._eps, out=hidden)
        keys, values = self.kv_cache.layers[0]
        attended = ops.attention(
            qkv,
            keys,
            values,
            inputs.attention,
            HeadTransform(self._rope_tables.tables[0], None, None, 0.0),
            num_heads=spec.num_heads,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            soft_cap=spec.soft_cap,
            queries=buffers.inner("queries", num_tokens, spec.q_size),
            out=buffers.inner("attended", num_tokens, spec.q_size),
        )
        ops.linear(attended, layer.attention.out, epilogue=ACCUMULATE, out=hidden)
        activate = Activate(mlp.activation, buffers.inner("up", num_tokens, mlp.up_size))
        activated = buffers.inner("activated", num_tokens, mlp.inner_size)
        norm = self._norm(layer.mlp.norms.before, scratch)
        ops.linear(hidden, layer.mlp.up, prologue=norm, epilogue=activate, out=activated)
        ops.linear(activated, layer.mlp.down, epilogue=ACCUMULATE, out=hidden)
        chosen = hidden
        if not shape.is_decode:
            chosen = ops.embedding(inputs.logits_indices, hidden, out=buffers.last_residual[: shape.num_sampled])
        return self._project(chosen, inputs)

    def _project(self, chosen: Tensor, inputs: StepInputs) -> Tensor:
        """Logits [S, V'] float32 of hidden states [S, H], which become the features that the next step reads."""
        num_rows, buffers, layers = chosen.shape[0], self._buffers, self._eagle.layers
        places = self._next_places[:num_rows]
        self._store(chosen, replace(inputs.attention, positions=places, slot_mapping=places))
        assert layers.lm_head is not None
        norm = self._norm(layers.final_norm, buffers.last_normed[:num_rows])
        return self.ops.linear(chosen, layers.lm_head, prologue=norm, out=buffers.own_logits[:num_rows])

    def _choose(self, running: RunningStep) -> Tensor:
        chosen = super()._choose(running)
        if self._eagle.token_ids is None:
            return chosen
        # Token ids are moved as bits, which is what a table of float32 does to them.
        table = self._eagle.token_ids
        bits = Tensor(table.buffer, table.shape, float32, table.offset)
        named = self.ops.embedding(chosen, bits, out=self._named[: chosen.shape[0]])
        return Tensor(named.buffer, chosen.shape, int32, named.offset)

    @property
    def _eps(self) -> float:
        norm = self.model.final_norm
        assert norm is not None
        return norm.eps

    def _norm(self, weights: NormWeights | None, scratch: Tensor) -> RMSNorm:
        assert weights is not None
        return RMSNorm(weights.weight, self._eps, scratch)
