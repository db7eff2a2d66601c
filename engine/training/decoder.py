"""The decoder's forward with a backward: the specifications of `engine.models.specs` over packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tessera.engine.autograd.functions import Functions
from tessera.engine.autograd.variable import Variable
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.rope import cos_sin_table
from tessera.engine.models.specs import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from tessera.engine.ops.training.interface import PackedSequences
from tessera.engine.tensor import Tensor, empty, float32, from_numpy
from tessera.engine.training.lora import Adapter
from tessera.engine.training.parameters import Parameters


class TrainableDecoder:
    """A decoder that computes losses.

    Attributes:
        adapters: by the module's name in a checkpoint, added to its product.
        checkpoints_layers: keep each layer's input alone, and compute the layer again in the backward.
    """

    def __init__(
        self,
        parameters: Parameters,
        functions: Functions,
        *,
        max_len: int,
        adapters: Mapping[str, Adapter] | None = None,
        checkpoints_layers: bool = False,
    ) -> None:
        """`max_len`: tokens of the longest sequence."""
        self.parameters = parameters
        self.config: ModelConfig = parameters.config
        self.functions = functions
        self.adapters = dict(adapters or {})
        self.checkpoints_layers = checkpoints_layers
        tables = (cos_sin_table(rope, max_len) for rope in self.config.ropes)
        self._rope_tables = [from_numpy(table, functions.device) for table in tables]

    def loss(self, token_ids: Tensor, targets: Tensor, factors: Tensor, sequences: PackedSequences) -> Variable:
        """The sum of factors[t] * cross entropy of targets[t] given the tokens up to t, [1] float32.

        token_ids and targets [T] int32 (a target below 0 has no loss), factors [T] float32.
        """
        stream, head = self.hidden_states(token_ids, sequences), self._head()
        multiplier = self.config.logits_multiplier
        return self.functions.linear_cross_entropy(stream, head, targets, factors, multiplier=multiplier)

    def token_losses(self, token_ids: Tensor, targets: Tensor, sequences: PackedSequences) -> Variable:
        """The cross entropy of each token's target, [T] float32; arguments as of `loss`."""
        stream = self.hidden_states(token_ids, sequences)
        return self.functions.token_losses(stream, self._head(), targets, multiplier=self.config.logits_multiplier)

    def logits(self, token_ids: Tensor, sequences: PackedSequences, places: Tensor) -> Tensor:
        """Of the tokens that follow those at `places` [n] int32, [n, V] float32; nothing is recorded."""
        f, head = self.functions, self._head().value
        with f.no_grad():
            hidden = f.ops.embedding(places, self.hidden_states(token_ids, sequences).value)
            logits = f.ops.matmul(hidden, head, out=empty((hidden.shape[0], head.shape[0]), float32, f.device))
            return f.ops.scale(logits, self.config.logits_multiplier, out=logits)

    def _head(self) -> Variable:
        return self.parameters.optional(None, "lm_head") or self.parameters.variable(None, "embedding")

    def hidden_states(self, token_ids: Tensor, sequences: PackedSequences) -> Variable:
        """The final norm's output [T, H]."""
        config, f, parameters = self.config, self.functions, self.parameters
        stream = f.embedding(token_ids, parameters.variable(None, "embedding"))
        if config.embedding_multiplier != 1.0:
            stream = f.scale(stream, config.embedding_multiplier)
        positions = parameters.optional(None, "position_embedding")
        if positions is not None:
            stream = f.add(stream, f.embedding(sequences.positions, positions))
        for index, spec in enumerate(config.layers):
            layer = partial(self._layer, index=index, spec=spec, sequences=sequences)
            stream = f.checkpoint(layer, stream) if self.checkpoints_layers else layer(stream)
        return self._norm(stream, None, "final_norm", config.final_norm)

    def _layer(self, stream: Variable, *, index: int, spec: LayerSpec, sequences: PackedSequences) -> Variable:
        attention, mlp = spec.attention, spec.mlp
        assert isinstance(mlp, MLPSpec), "mixtures are not trained"
        normed = self._norm(stream, index, "attention_norm_before", attention.norms.before)
        attended = self._attention(normed, index, attention, sequences)
        if spec.parallel:
            own = self._norm(stream, index, "mlp_norm_before", mlp.norms.before)
            updated = self._mlp(normed if mlp.norms.before is None else own, index, mlp)
            stream = self._add_half(stream, attended, index, "attention", spec)
            return self._add_half(stream, updated, index, "mlp", spec)
        stream = self._add_half(stream, attended, index, "attention", spec)
        normed = self._norm(stream, index, "mlp_norm_before", mlp.norms.before)
        return self._add_half(stream, self._mlp(normed, index, mlp), index, "mlp", spec)

    def _add_half(self, stream: Variable, update: Variable, index: int, half: str, spec: LayerSpec) -> Variable:
        f = self.functions
        norms = spec.attention.norms if half == "attention" else spec.mlp.norms
        update = self._norm(update, index, f"{half}_norm_after", norms.after)
        if spec.residual_multiplier != 1.0:
            update = f.scale(update, spec.residual_multiplier)
        return self._norm(f.add(stream, update), index, f"{half}_norm_of_sum", norms.of_sum)

    def _attention(self, x: Variable, index: int, spec: AttentionSpec, sequences: PackedSequences) -> Variable:
        f = self.functions
        qkv = self._linear(x, index, "qkv")
        if spec.qk_norm is not None:
            qkv = self._norm_heads(qkv, index, spec, spec.qk_norm.eps)
        if spec.rope is not None:
            rotated = spec.num_heads + spec.num_kv_heads
            table = self._rope_tables[spec.rope]
            qkv = f.rope(qkv, table, sequences.positions, head_dim=spec.head_dim, num_rotated=rotated)
        attended = f.packed_attention(
            qkv,
            sequences,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
        )
        return self._linear(attended, index, "out")

    def _norm_heads(self, qkv: Variable, index: int, spec: AttentionSpec, eps: float) -> Variable:
        f, num_tokens = self.functions, qkv.shape[0]
        ends = (0, spec.q_size, spec.q_size + spec.kv_size)
        normed = []
        for name, start, stop in (("q_norm", ends[0], ends[1]), ("k_norm", ends[1], ends[2])):
            heads = f.view(f.columns(qkv, start, stop), num_tokens * (stop - start) // spec.head_dim, spec.head_dim)
            heads = f.rmsnorm(heads, self.parameters.variable(index, name), eps)
            normed.append(f.view(heads, num_tokens, stop - start))
        return f.join_columns(*normed, f.columns(qkv, ends[2], spec.qkv_size))

    def _mlp(self, x: Variable, index: int, spec: MLPSpec) -> Variable:
        f, up = self.functions, self._linear(x, index, "up")
        if spec.activation == "silu_mul":
            inner = f.silu_mul(up)
        elif spec.activation in ("gelu_tanh_mul", "gelu_erf_mul"):
            inner = f.gelu_mul(up, tanh=spec.activation == "gelu_tanh_mul")
        else:
            inner = f.gelu(up, tanh=spec.activation == "gelu_tanh")
        return self._linear(inner, index, "down")

    def _linear(self, x: Variable, index: int, field: str) -> Variable:
        """The product with its bias, and what adapters of its modules add."""
        f, quantised = self.functions, self.parameters.quantised.get((index, field))
        if quantised is not None:
            parts, y = quantised.parts, f.frozen_linear(x, quantised.weight)
        else:
            parameter = self.parameters.by_key[index, field, "weight"]
            parts = parameter.parts
            y = f.matmul(x, parameter.variable, self.parameters.optional(index, field, "bias"))
        start = 0
        for name, rows in parts:
            adapter = self.adapters.get(name.removesuffix(".weight"))
            if adapter is not None:
                update = f.matmul(f.matmul(x, adapter.a), adapter.b)
                y = f.add_columns(y, update, start, adapter.factor, in_place=True)
            start += rows
        return y

    def _norm(self, x: Variable, index: int | None, field: str, spec: NormSpec | None) -> Variable:
        """x itself where there is no such norm."""
        if spec is None:
            return x
        weight, bias = self.parameters.variable(index, field), self.parameters.optional(index, field, "bias")
        if spec.kind == "rmsnorm":
            return self.functions.rmsnorm(x, weight, spec.eps)
        return self.functions.layernorm(x, weight, bias, spec.eps)
