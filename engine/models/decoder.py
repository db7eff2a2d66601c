"""The one decoder forward: embedding, pre-norm residual layers, final norm, head.

Nothing is allocated and nothing crosses between host and device inside `forward`: every result goes
to memory made beforehand, so that a whole step can be captured and replayed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.models.config import LayerConfig, ModelConfig
from engine.models.kv_cache import KVCache
from engine.models.weights import LayerWeights, Weights
from engine.ops.interface import AttentionMetadata, Ops
from engine.tensor import Device, Tensor, float32

ALIGNMENT = 256


class StepBuffers:
    """Activations of the largest step, T tokens and S rows of logits, in one allocation.

    Attention's and the MLP's intermediates are never alive together and share memory.

    Raises: OutOfMemoryError.
    """

    residual: Tensor  # [T, H] the stream that layers add to
    normed: Tensor  # [T, H] a layer half's input
    update: Tensor  # [T, H] a layer half's output, not yet added
    qkv: Tensor  # [T, (Hq + 2 Hkv) * D]
    queries: Tensor  # [T, Hq * D]
    attended: Tensor  # [T, Hq * D]
    up: Tensor  # [T, 2 I or I]
    activated: Tensor  # [T, I]
    last_residual: Tensor  # [S, H] rows that are projected to logits
    last_update: Tensor  # [S, H]
    last_normed: Tensor  # [S, H]
    logits: Tensor  # [S, V] float32

    def __init__(
        self, config: ModelConfig, dtype: np.dtype[Any], device: Device, *, max_tokens: int, max_logits: int
    ) -> None:
        self.nbytes = buffer_bytes(config, dtype, max_tokens=max_tokens, max_logits=max_logits)
        buffer = device.allocate(self.nbytes)
        for name, (shape, kind, offset) in _layout(config, dtype, max_tokens, max_logits).items():
            setattr(self, name, Tensor(buffer, shape, kind, offset))


def buffer_bytes(config: ModelConfig, dtype: np.dtype[Any], *, max_tokens: int, max_logits: int) -> int:
    layout = _layout(config, dtype, max_tokens, max_logits).values()
    return max(offset + int(np.prod(shape)) * kind.itemsize for shape, kind, offset in layout)


def _layout(
    config: ModelConfig, dtype: np.dtype[Any], max_tokens: int, max_logits: int
) -> dict[str, tuple[tuple[int, int], np.dtype[Any], int]]:
    """Shape, dtype and offset of each buffer."""
    tokens: dict[str, int] = dict.fromkeys(("residual", "normed", "update"), config.hidden_size)
    attention = {"qkv": config.qkv_size, "queries": config.q_size, "attended": config.q_size}
    mlp = {"up": config.up_size, "activated": config.intermediate_size}
    last: dict[str, int] = dict.fromkeys(("last_residual", "last_update", "last_normed"), config.hidden_size)
    layout: dict[str, tuple[tuple[int, int], np.dtype[Any], int]] = {}

    def place(widths: dict[str, int], rows: int, kind: np.dtype[Any], offset: int) -> int:
        for name, width in widths.items():
            layout[name] = ((rows, width), kind, offset)
            offset += -(-rows * width * kind.itemsize // ALIGNMENT) * ALIGNMENT
        return offset

    shared = place(tokens, max_tokens, dtype, 0)
    end = max(place(attention, max_tokens, dtype, shared), place(mlp, max_tokens, dtype, shared))
    end = place(last, max_logits, dtype, end)
    place({"logits": config.vocab_size}, max_logits, float32, end)
    return layout


class Decoder:
    """A model ready to run: `cos_sin` [P, rotary_dim] float32 is None with learned positions."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, kv_cache: KVCache, cos_sin: Tensor | None
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        self.kv_cache = kv_cache
        self.cos_sin = cos_sin

    def forward(
        self, input_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor, buffers: StepBuffers
    ) -> Tensor:
        """Store this step's keys and values, return logits [S, V] float32 of the tokens chosen by
        `logits_indices` [S] int32 among input_ids [T] int32. The result lives in `buffers` until
        the next step."""
        self._layers(input_ids, metadata, buffers)
        return self.project(logits_indices, buffers)

    def project(self, logits_indices: Tensor, buffers: StepBuffers) -> Tensor:
        """Logits [S, V] float32 of tokens of the step that `buffers` is from, as `forward` gives them; they
        take the place of the last ones."""
        ops, weights = self.ops, self.weights
        num_logits = logits_indices.shape[0]
        last_residual = ops.embedding(logits_indices, buffers.residual, out=buffers.last_residual[:num_logits])
        last_update = ops.embedding(logits_indices, buffers.update, out=buffers.last_update[:num_logits])
        last = buffers.last_normed[:num_logits]
        self._add_and_norm(last_update, last_residual, weights.final_norm, weights.final_norm_bias, last)
        return ops.matmul(last, weights.lm_head, out=buffers.logits[:num_logits])

    def hidden_states(self, input_ids: Tensor, metadata: AttentionMetadata, buffers: StepBuffers) -> Tensor:
        """As `forward`, but the final norm's output [T, H] of every token instead of logits."""
        residual, update = self._layers(input_ids, metadata, buffers)
        hidden = buffers.normed[: input_ids.shape[0]]
        self._add_and_norm(update, residual, self.weights.final_norm, self.weights.final_norm_bias, hidden)
        return hidden

    def _layers(self, input_ids: Tensor, metadata: AttentionMetadata, buffers: StepBuffers) -> tuple[Tensor, Tensor]:
        """The residual stream and the last layer's output, not yet added; both [T, H]."""
        ops, weights = self.ops, self.weights
        num_tokens = input_ids.shape[0]
        residual = ops.embedding(input_ids, weights.embedding, out=buffers.residual[:num_tokens])
        if weights.position_embedding is not None:
            position = ops.embedding(metadata.positions, weights.position_embedding, out=buffers.normed[:num_tokens])
            ops.add(residual, position, out=residual)
        update = None
        for index, layer in enumerate(weights.layers):
            normed = buffers.normed[:num_tokens]
            self._add_and_norm(update, residual, layer.input_norm, layer.input_norm_bias, normed)
            update = self._attention(index, layer, normed, metadata, buffers)
            self._add_and_norm(update, residual, layer.mlp_norm, layer.mlp_norm_bias, normed)
            update = self._mlp(layer, normed, buffers)
        assert update is not None, "a model has at least one layer"
        return residual, update

    def _add_and_norm(
        self, update: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """residual += update, out = norm(residual)."""
        ops, eps = self.ops, self.config.norm_eps
        if self.config.norm == "layernorm":
            if update is not None:
                ops.add(residual, update, out=residual)
            ops.layernorm(residual, weight, bias, eps, out=out)
        elif update is None:
            ops.rmsnorm(residual, weight, eps, out=out)
        else:
            ops.add_rmsnorm(update, residual, weight, eps, out=out)

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, metadata: AttentionMetadata, buffers: StepBuffers
    ) -> Tensor:
        ops, config = self.ops, self.config
        settings: LayerConfig = config.layers[index]
        keys, values = self.kv_cache.layers[index]
        num_tokens = x.shape[0]
        qkv = ops.matmul(x, layer.qkv, layer.qkv_bias, out=buffers.qkv[:num_tokens])
        queries = ops.rope_and_store(
            qkv,
            keys,
            values,
            metadata,
            self.cos_sin if settings.rope else None,
            num_heads=config.num_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.norm_eps,
            out=buffers.queries[:num_tokens],
        )
        attended = ops.paged_attention(
            queries,
            keys,
            values,
            metadata,
            scale=settings.attention_scale,
            sliding_window=settings.sliding_window,
            out=buffers.attended[:num_tokens],
        )
        return ops.matmul(attended, layer.out, layer.out_bias, out=buffers.update[:num_tokens])

    def _mlp(self, layer: LayerWeights, x: Tensor, buffers: StepBuffers) -> Tensor:
        ops = self.ops
        num_tokens = x.shape[0]
        up = ops.matmul(x, layer.up, layer.up_bias, out=buffers.up[:num_tokens])
        activated = buffers.activated[:num_tokens]
        if self.config.activation == "silu_mul":
            ops.silu_mul(up, out=activated)
        else:
            ops.gelu(up, tanh=self.config.activation == "gelu_tanh", out=activated)
        return ops.matmul(activated, layer.down, layer.down_bias, out=buffers.update[:num_tokens])
