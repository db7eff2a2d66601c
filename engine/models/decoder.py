"""The one decoder forward: embedding, pre-norm residual layers, final norm, head.

Nothing is allocated and nothing crosses between host and device inside `forward`: every result goes
to memory made beforehand, so that a whole step can be captured and replayed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.formats import LinearWeight
from tessera.engine.models.config import LayerConfig, ModelConfig
from tessera.engine.models.kv_cache import KVCache
from tessera.engine.models.weights.loader import LayerWeights, Weights
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform, Ops
from tessera.engine.ops.linear_interface import Activate, LayerNorm, RMSNorm
from tessera.engine.tensor import Device, Tensor, float32

ALIGNMENT = 256


class StepBuffers:
    """Activations of the largest step, T tokens and S rows of logits, in one allocation.

    Attention's and the MLP's intermediates are never alive together and share memory.

    Raises: OutOfMemoryError.
    """

    residual: Tensor  # [T, H] the stream that layers add to
    normed: Tensor  # [T, H] a layer half's input
    qkv: Tensor  # [T, (Hq + 2 Hkv) * D]
    queries: Tensor  # [T, Hq * D]
    attended: Tensor  # [T, Hq * D]
    up: Tensor  # [T, 2 I or I]
    activated: Tensor  # [T, I]
    last_residual: Tensor  # [S, H] rows that are projected to logits
    last_queries: Tensor  # [S, Hq * D]
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
    tokens: dict[str, int] = dict.fromkeys(("residual", "normed"), config.hidden_size)
    attention = {"qkv": config.qkv_size, "queries": config.q_size, "attended": config.q_size}
    mlp = {"up": config.up_size, "activated": config.intermediate_size}
    last: dict[str, int] = dict.fromkeys(("last_residual", "last_normed"), config.hidden_size)
    last["last_queries"] = config.q_size
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
        self._transforms = [
            HeadTransform(cos_sin if settings.rope else None, layer.q_norm, layer.k_norm, config.norm_eps)
            for settings, layer in zip(config.layers, weights.layers, strict=True)
        ]

    def forward(
        self,
        input_ids: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor | None,
        buffers: StepBuffers,
        *,
        sampled: Tensor | None = None,
        last: AttentionMetadata | None = None,
    ) -> Tensor:
        """Store this step's keys and values, return logits [S, V] float32 of the tokens chosen by
        `logits_indices` [S] int32 among input_ids [T] int32 (None: of all). A negative id -1 - n stands
        for sampled[n]. The result lives in `buffers` until the next step.

        `last` describes the chosen tokens as S rows of one query each. With it the last layer computes
        nothing of others but their keys and values, and `project` cannot be asked for others afterwards.
        """
        num_layers = len(self.weights.layers)
        if last is not None:
            assert logits_indices is not None, "`last` describes chosen tokens"
            residual = self._layers(input_ids, metadata, buffers, sampled, num_layers=num_layers - 1)
            return self._logits(self._last_layer(residual, metadata, logits_indices, last, buffers), buffers)
        residual = self._layers(input_ids, metadata, buffers, sampled, num_layers=num_layers)
        if logits_indices is None:
            return self._logits(residual, buffers)
        return self.project(logits_indices, buffers)

    def project(self, logits_indices: Tensor, buffers: StepBuffers) -> Tensor:
        """Logits [S, V] float32 of tokens of the step that `buffers` is from, as `forward` gives them; they
        take the place of the last ones."""
        chosen = buffers.last_residual[: logits_indices.shape[0]]
        return self._logits(self.ops.embedding(logits_indices, buffers.residual, out=chosen), buffers)

    def _logits(self, residual: Tensor, buffers: StepBuffers) -> Tensor:
        """Of at most `max_logits` rows [S, H] of the residual stream -> [S, V] float32 in `buffers`."""
        num_logits, weights = residual.shape[0], self.weights
        normed = buffers.last_normed[:num_logits]
        logits = buffers.logits[:num_logits]
        return self._norm_matmul(
            residual, weights.final_norm, weights.final_norm_bias, weights.lm_head, None, normed, logits
        )

    def hidden_states(self, input_ids: Tensor, metadata: AttentionMetadata, buffers: StepBuffers) -> Tensor:
        """As `forward`, but the final norm's output [T, H] of every token instead of logits."""
        weights = self.weights
        residual = self._layers(input_ids, metadata, buffers, num_layers=len(weights.layers))
        normed = buffers.normed[: input_ids.shape[0]]
        if self.config.norm == "layernorm":
            return self.ops.layernorm(
                residual, weights.final_norm, weights.final_norm_bias, self.config.norm_eps, out=normed
            )
        return self.ops.rmsnorm(residual, weights.final_norm, self.config.norm_eps, out=normed)

    def _layers(
        self,
        input_ids: Tensor,
        metadata: AttentionMetadata,
        buffers: StepBuffers,
        sampled: Tensor | None = None,
        *,
        num_layers: int,
    ) -> Tensor:
        """The residual stream [T, H] after the first `num_layers` layers."""
        ops, weights = self.ops, self.weights
        num_tokens = input_ids.shape[0]
        residual = ops.embedding(input_ids, weights.embedding, out=buffers.residual[:num_tokens], sampled=sampled)
        if weights.position_embedding is not None:
            position = ops.embedding(metadata.positions, weights.position_embedding, out=buffers.normed[:num_tokens])
            ops.add(residual, position, out=residual)
        for index, layer in enumerate(weights.layers[:num_layers]):
            self._attention(index, layer, residual, metadata, buffers)
            self._mlp(layer, residual, buffers)
        return residual

    def _last_layer(
        self,
        residual: Tensor,
        metadata: AttentionMetadata,
        chosen: Tensor,
        last: AttentionMetadata,
        buffers: StepBuffers,
    ) -> Tensor:
        """The residual stream [S, H] of the tokens `chosen` [S] after the last layer."""
        ops, config = self.ops, self.config
        index = len(self.weights.layers) - 1
        layer, settings = self.weights.layers[index], config.layers[index]
        keys, values = self.kv_cache.layers[index]
        num_tokens, num_chosen = residual.shape[0], chosen.shape[0]
        queries = ops.rope_and_store(
            self._qkv(layer, residual, buffers),
            keys,
            values,
            metadata,
            self._transforms[index],
            num_heads=config.num_heads,
            out=buffers.queries[:num_tokens],
        )
        attended = ops.paged_attention(
            ops.embedding(chosen, queries, out=buffers.last_queries[:num_chosen]),
            keys,
            values,
            last,
            scale=settings.attention_scale,
            sliding_window=settings.sliding_window,
            out=buffers.attended[:num_chosen],
        )
        stream = ops.embedding(chosen, residual, out=buffers.last_residual[:num_chosen])
        ops.matmul(attended, layer.out, layer.out_bias, out=stream, accumulate=True)
        self._mlp(layer, stream, buffers)
        return stream

    def _qkv(self, layer: LayerWeights, residual: Tensor, buffers: StepBuffers) -> Tensor:
        """[T, (Hq + 2 Hkv) * D]"""
        num_tokens = residual.shape[0]
        normed, qkv = buffers.normed[:num_tokens], buffers.qkv[:num_tokens]
        return self._norm_matmul(
            residual, layer.input_norm, layer.input_norm_bias, layer.qkv, layer.qkv_bias, normed, qkv
        )

    def _norm_matmul(
        self,
        x: Tensor,
        norm: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        normed: Tensor,
        out: Tensor,
    ) -> Tensor:
        """norm(x) times weight; `normed` is scratch."""
        eps = self.config.norm_eps
        rms = self.config.norm == "rmsnorm"
        prologue = RMSNorm(norm, eps, normed) if rms else LayerNorm(norm, norm_bias, eps, normed)
        return self.ops.linear(x, LinearWeight.of(weight, bias), prologue=prologue, out=out)

    def _attention(
        self, index: int, layer: LayerWeights, residual: Tensor, metadata: AttentionMetadata, buffers: StepBuffers
    ) -> None:
        """residual += the attention half of a layer."""
        ops, config = self.ops, self.config
        settings: LayerConfig = config.layers[index]
        keys, values = self.kv_cache.layers[index]
        num_tokens = residual.shape[0]
        attended = ops.attention(
            self._qkv(layer, residual, buffers),
            keys,
            values,
            metadata,
            self._transforms[index],
            num_heads=config.num_heads,
            scale=settings.attention_scale,
            sliding_window=settings.sliding_window,
            queries=buffers.queries[:num_tokens],
            out=buffers.attended[:num_tokens],
        )
        ops.matmul(attended, layer.out, layer.out_bias, out=residual, accumulate=True)

    def _mlp(self, layer: LayerWeights, residual: Tensor, buffers: StepBuffers) -> None:
        """residual += the MLP half of a layer."""
        ops, config = self.ops, self.config
        num_tokens = residual.shape[0]
        normed, up = buffers.normed[:num_tokens], buffers.up[:num_tokens]
        activated = buffers.activated[:num_tokens]
        if config.activation == "silu_mul" and config.norm == "rmsnorm" and layer.up_bias is None:
            prologue, epilogue = RMSNorm(layer.mlp_norm, config.norm_eps, normed), Activate("silu_mul", up)
            ops.linear(residual, LinearWeight.of(layer.up), prologue=prologue, epilogue=epilogue, out=activated)
        else:
            self._norm_matmul(residual, layer.mlp_norm, layer.mlp_norm_bias, layer.up, layer.up_bias, normed, up)
            if config.activation == "silu_mul":
                ops.silu_mul(up, out=activated)
            else:
                ops.gelu(up, tanh=config.activation == "gelu_tanh", out=activated)
        ops.matmul(activated, layer.down, layer.down_bias, out=residual, accumulate=True)
