"""An EAGLE-3 head: one layer that drafts from the served model's hidden states (Li et al. 2025; see `eagle3_config`).

A feature is what `fc` makes of three hidden states of the served model. Its most likely tokens are drafted.
"""

from __future__ import annotations

from functools import partial

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import RowFlag
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.drafters.eagle3_config import NUM_FEATURES, Eagle3Config
from tessera.engine.drafters.eagle3_weights import Eagle3Weights, dummy_eagle3, load_eagle3
from tessera.engine.drafters.states import StateDrafter
from tessera.engine.models.blocks import ACCUMULATE
from tessera.engine.models.specs import MLPSpec
from tessera.engine.models.weights.weights import MLPWeights, NormWeights, Weights
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform, Ops
from tessera.engine.ops.linear_interface import Activate, RMSNorm
from tessera.engine.runner.model_runner import ModelRunner, Progress
from tessera.engine.runner.step_inputs import StepInputs
from tessera.engine.tensor import CpuDevice, Device, Tensor, empty, float32, int32


class Eagle3(StateDrafter):
    """Runs a head; see `DraftRunner`."""

    filters = (False,)

    def __init__(self, config: EngineConfig, head: Eagle3Config, device: Device, ops: Ops) -> None:
        super().__init__(config, head.model, device, ops)
        self._head = head

    @property
    def planned_bytes(self) -> int:
        hidden = self.model.hidden_size
        extra = (self._spec.qkv_size + NUM_FEATURES * hidden) * hidden * self._dtype.itemsize
        return super().planned_bytes + extra

    def load(self, served: ModelRunner, progress: Progress | None) -> None:
        self._served_embedding = served.weights.embedding
        self._served_vocab = served.model.vocab_size
        super().load(served, progress)
        eagle = self._eagle
        if not isinstance(self.device, CpuDevice):
            self._cuda_ops.reserve_linear(eagle.extra(), self._dtype, max(self._buffer_tokens, served.max_step_tokens))
        own = eagle.layers.embedding is not self._served_embedding
        shared = 0 if own else sum(tensor.nbytes for tensor in self._served_embedding.tensors())
        self.weight_bytes = eagle.nbytes - shared
        self.num_parameters = eagle.num_parameters - (0 if own else self._served_embedding.num_parameters)
        self._named = empty((self.config.max_num_seqs, 1), float32, self.device)

    def _load_weights(self, progress: Progress | None) -> Weights:
        self._eagle = self._read_weights()
        return self._eagle.layers

    def _read_weights(self) -> Eagle3Weights:
        if self.config.load_format == "dummy":
            return dummy_eagle3(self._head, self._dtype, self.device, self._served_embedding, self.config.seed or 0)
        return load_eagle3(self._head, self._dtype, self.device, self._served_embedding, self._served_vocab)

    def allocate(self, served: ModelRunner) -> None:
        super().allocate(served)
        layers = self._head.feature_layers
        for layer in sorted(set(layers)):
            parts = [part for part, each in enumerate(layers) if each == layer]
            served.decoder.tap(layer, partial(self._combine, parts))

    # -- a step of the served model -------------------------------------------------------------

    def _combine(self, parts: list[int], stream: Tensor, metadata: AttentionMetadata) -> None:
        """Add what these parts of `fc` make of the stream [T, H]; with the last part the features are there."""
        combined = self._feature[: stream.shape[0]]
        for part in parts:
            epilogue = ACCUMULATE if part else None
            self.ops.linear(stream, self._eagle.combine[part], epilogue=epilogue, out=combined)
        if NUM_FEATURES - 1 in parts:
            self._store(combined, metadata)

    # -- a step of the head ---------------------------------------------------------------------

    def _prepare(self, step: StepBatch) -> None:
        step.sampling.rows["temperature"] = 0.0  # its tokens have other numbers, so chance chooses others
        step.sampling.flags &= ~RowFlag.FILTERED  # which never excludes the most likely one

    def _forward(self, inputs: StepInputs, *, every_token: bool = False, adapted: bool = False) -> Tensor:
        ops, buffers, spec = self.ops, self._buffers, self._spec
        layer, eagle, num_tokens = self._eagle.layers.layers[0], self._eagle, inputs.shape.num_tokens
        mlp = self.model.layers[0].mlp
        assert isinstance(mlp, MLPSpec)
        assert isinstance(layer.mlp, MLPWeights)
        self._update_tables(inputs)
        scratch = buffers.normed[:num_tokens]
        hidden, embedded = self._read_inputs(inputs, buffers.residual[:num_tokens])
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
        return self._project(self._chosen_rows(hidden, inputs), inputs)

    def _project(self, chosen: Tensor, inputs: StepInputs) -> Tensor:
        """Logits [S, V'] float32 of hidden states [S, H], which become the features that the next step reads."""
        num_rows, buffers, layers = chosen.shape[0], self._buffers, self._eagle.layers
        self._store_for_next(chosen, inputs)
        assert layers.lm_head is not None
        norm = self._norm(layers.final_norm, buffers.last_normed[:num_rows])
        return self.ops.linear(chosen, layers.lm_head, prologue=norm, out=buffers.own_logits[:num_rows])

    def _choose_tokens(self, logits: Tensor, inputs: StepInputs, *, filtered: bool) -> Tensor:
        chosen = super()._choose_tokens(logits, inputs, filtered=filtered)
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
