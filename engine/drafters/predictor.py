"""A model's own layer of multi-token prediction; see `engine.models.registry.predictor` for what it computes.

The checkpoint's first such layer drafts every token: it was trained for the second next one, and is applied to what it
had itself for those after it. Its embedding and head are the served model's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.drafters.predictor_weights import dummy_predictor, load_predictor
from tessera.engine.drafters.states import StateDrafter
from tessera.engine.gguf.names import is_gguf
from tessera.engine.models.blocks import ACCUMULATE, make_norm
from tessera.engine.models.buffers import buffer_bytes
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.decoder import DecoderLayer
from tessera.engine.models.registry import ARCHITECTURES
from tessera.engine.models.registry.predictor import NUM_PREDICTORS, predictor_architecture
from tessera.engine.models.specs import MoESpec
from tessera.engine.models.weights.build import layer_bytes
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.interface import AttentionMetadata, Ops
from tessera.engine.runner.model_runner import ModelRunner, Progress
from tessera.engine.runner.step_inputs import StepInputs
from tessera.engine.tensor import CpuDevice, Device, Tensor, empty


def predictor_config(folder: Path, served: ModelConfig) -> ModelConfig:
    """The layer in a served model's folder as a model of one layer. Raises: ConfigError where there is none."""
    rule = ARCHITECTURES[served.architecture].predictor
    if is_gguf(folder):
        raise ConfigError(
            f"the speculative method mtp reads layers of multi-token prediction from model folders, and {folder} is a "
            "GGUF file"
        )
    if rule is None or not served.num_predictors:
        names = ", ".join(sorted(name for name, entry in ARCHITECTURES.items() if entry.predictor is not None))
        raise ConfigError(
            f"the speculative method mtp needs a model with layers of multi-token prediction, which config.json counts "
            f"in {NUM_PREDICTORS}; {folder} has none. They are read from models of {names}"
        )
    kinds = (spec for spec in reversed(served.layers) if isinstance(spec.mlp, MoESpec) == rule.sparse)
    spec = next(kinds, None)
    kind = "mixture of experts" if rule.sparse else "dense MLP"
    if spec is None:
        raise ConfigError(f"{folder}: its layer of multi-token prediction has a {kind}, and no other layer has")
    hidden, head_dim = served.hidden_size, spec.attention.head_dim
    if hidden % (2 * head_dim):
        raise ConfigError(f"{folder}: a hidden size of {hidden} does not divide into heads of {2 * head_dim}")
    return replace(served, layers=(spec,), num_predictors=0, notes=())


class Predictor(StateDrafter):
    """Runs the layer; see `DraftRunner`. A feature is the output of the served model's last layer."""

    def __init__(self, config: EngineConfig, served: ModelConfig, device: Device, ops: Ops) -> None:
        """`served`: the model. Raises: ConfigError, see `predictor_config`."""
        self._folder = Path(config.model)
        model = predictor_config(self._folder, served)
        rule = ARCHITECTURES[served.architecture].predictor
        assert rule is not None, "the model has such layers"
        self._rule = rule
        self._architecture = predictor_architecture(ARCHITECTURES[served.architecture], served.num_layers)
        super().__init__(config, model, device, ops)

    @property
    def planned_bytes(self) -> int:
        hidden, rows = self.model.hidden_size, self.config.max_num_seqs
        weights = sum(layer_bytes(self.model, self._dtype)) + 2 * hidden * hidden * self._dtype.itemsize
        return weights + buffer_bytes(self.model, self._dtype, max_tokens=self._buffer_tokens, max_logits=rows)

    def load(self, served: ModelRunner, progress: Progress | None) -> None:
        self._served = served.weights
        super().load(served, progress)
        joining = [self._predictor.of_tokens, self._predictor.of_states]
        if not isinstance(self.device, CpuDevice):
            self._cuda_ops.reserve_linear(joining, self._dtype, self._buffer_tokens)
        self.weight_bytes = self._predictor.nbytes
        self.num_parameters = self._predictor.num_parameters
        self._states = empty((self._buffer_tokens, self.model.hidden_size), self._dtype, self.device)

    def _load_weights(self, progress: Progress | None) -> Weights:
        if self.config.load_format == "dummy":
            seed = self.config.seed or 0
            self._predictor = dummy_predictor(self.model, self._dtype, self.ops, self._served, seed)
        else:
            self._predictor = load_predictor(
                self._folder,
                self.model,
                self._architecture,
                self._dtype,
                self.ops,
                self._served,
                states_first=self._rule.states_first,
            )
        return self._predictor.model

    def _allocate(self, num_kv_blocks: int) -> None:
        super()._allocate(num_kv_blocks)
        weights, tables = self._predictor.model, self._rope_tables.tables
        [cache], [layer] = self.kv_cache.layers, weights.layers
        self._layer = DecoderLayer(self.model.layers[0], layer, self.ops, cache, tables, None, None, is_normed=False)
        final_norm = make_norm(self.model.final_norm, weights.final_norm)
        token_norm = make_norm(self.model.final_norm, self._predictor.token_norm)
        state_norm = make_norm(self.model.final_norm, self._predictor.state_norm)
        assert final_norm is not None
        assert token_norm is not None
        assert state_norm is not None
        self._final_norm, self._token_norm, self._state_norm = final_norm, token_norm, state_norm

    def allocate(self, served: ModelRunner) -> None:
        super().allocate(served)
        self._served_norm = make_norm(served.model.final_norm, served.weights.final_norm)
        served.decoder.tap(served.model.num_layers, self._keep_states)

    def _keep_states(self, stream: Tensor, metadata: AttentionMetadata) -> None:
        """In a step of the served model."""
        if self._rule.reads_normed:
            assert self._served_norm is not None, "a decoder ends with a norm"
            stream = self._served_norm.apply(self.ops, stream, out=self._feature[: stream.shape[0]])
        self._store(stream, metadata)

    def _forward(self, inputs: StepInputs, *, every_token: bool = False, adapted: bool = False) -> Tensor:
        ops, buffers, predictor, num_tokens = self.ops, self._buffers, self._predictor, inputs.shape.num_tokens
        self._update_tables(inputs)
        states, embedded = self._read_inputs(inputs, self._states[:num_tokens])
        stream, scratch = buffers.residual[:num_tokens], buffers.normed[:num_tokens]
        ops.linear(embedded, predictor.of_tokens, prologue=self._token_norm.prologue(scratch), out=stream)
        norm = self._state_norm.prologue(scratch)
        ops.linear(states, predictor.of_states, prologue=norm, epilogue=ACCUMULATE, out=stream)
        self._layer.forward(stream, inputs.attention, buffers)
        return self._project(self._chosen_rows(stream, inputs), inputs)

    def _project(self, chosen: Tensor, inputs: StepInputs) -> Tensor:
        """Logits [S, V] float32 of rows [S, H] of the stream, which become what the next step reads."""
        num_rows, head = chosen.shape[0], self._predictor.model.lm_head
        assert head is not None, "a decoder has a head"
        normed, out = self._buffers.last_normed[:num_rows], self._buffers.own_logits[:num_rows]
        if not self._rule.passes_normed:
            self._store_for_next(chosen, inputs)
            return self.ops.linear(chosen, head, prologue=self._final_norm.prologue(normed), out=out)
        self._final_norm.apply(self.ops, chosen, out=normed)
        self._store_for_next(normed, inputs)
        return self.ops.linear(normed, head, out=out)
