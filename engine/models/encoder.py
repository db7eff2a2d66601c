"""The one encoder forward: embeddings, then post-norm layers in which every token sees its whole text.

As in BERT (Devlin et al. 2019). Nothing is allocated and nothing crosses between host and device inside
`forward`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.models.config import ModelConfig
from tessera.engine.models.weights.loader import EncoderWeights, LayerWeights
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Device, Tensor, empty


class EncoderBuffers:
    """Activations of the largest pass, T tokens. Raises: OutOfMemoryError."""

    def __init__(self, config: ModelConfig, dtype: np.dtype[Any], device: Device, max_tokens: int) -> None:
        def rows(width: int) -> Tensor:
            return empty((max_tokens, width), dtype, device)

        self.hidden = rows(config.hidden_size)
        self.update = rows(config.hidden_size)  # a layer half's output, not yet added
        self.qkv = rows(config.qkv_size)
        self.attended = rows(config.q_size)
        self.up = rows(config.up_size)
        self.activated = rows(config.intermediate_size)


class Encoder:
    """A model ready to run."""

    def __init__(self, config: ModelConfig, weights: EncoderWeights, ops: Ops) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        token_types: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        buffers: EncoderBuffers,
    ) -> Tensor:
        """Token vectors [T, H] of R texts, one after the other.

        input_ids, positions and token_types [T] int32; cu_seqlens [R + 1] int32 and max_seqlen as in
        `bidirectional_attention`. The result lives in `buffers` until the next pass.
        """
        ops, weights, num_tokens = self.ops, self.weights, input_ids.shape[0]
        hidden = ops.embedding(input_ids, weights.embedding, out=buffers.hidden[:num_tokens])
        for ids, table in ((token_types, weights.token_type_embedding), (positions, weights.position_embedding)):
            ops.add(hidden, ops.embedding(ids, table, out=buffers.update[:num_tokens]), out=hidden)
        ops.layernorm(hidden, weights.embedding_norm, weights.embedding_norm_bias, self.config.norm_eps, out=hidden)
        for index, layer in enumerate(weights.layers):
            update = self._attention(index, layer, hidden, cu_seqlens, max_seqlen, buffers)
            self._add_and_norm(hidden, update, layer.input_norm, layer.input_norm_bias)
            update = self._mlp(layer, hidden, buffers)
            self._add_and_norm(hidden, update, layer.mlp_norm, layer.mlp_norm_bias)
        return hidden

    def _add_and_norm(self, hidden: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """hidden = norm(hidden + update), in place."""
        self.ops.add(hidden, update, out=hidden)
        self.ops.layernorm(hidden, weight, bias, self.config.norm_eps, out=hidden)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        buffers: EncoderBuffers,
    ) -> Tensor:
        ops, num_tokens = self.ops, x.shape[0]
        qkv = ops.matmul(x, layer.qkv, layer.qkv_bias, out=buffers.qkv[:num_tokens])
        attended = ops.bidirectional_attention(
            qkv,
            cu_seqlens,
            max_seqlen,
            num_heads=self.config.num_heads,
            scale=self.config.layers[index].attention_scale,
            out=buffers.attended[:num_tokens],
        )
        return ops.matmul(attended, layer.out, layer.out_bias, out=buffers.update[:num_tokens])

    def _mlp(self, layer: LayerWeights, x: Tensor, buffers: EncoderBuffers) -> Tensor:
        ops, num_tokens = self.ops, x.shape[0]
        up = ops.matmul(x, layer.up, layer.up_bias, out=buffers.up[:num_tokens])
        tanh = self.config.activation == "gelu_tanh"
        activated = ops.gelu(up, tanh=tanh, out=buffers.activated[:num_tokens])
        return ops.matmul(activated, layer.down, layer.down_bias, out=buffers.update[:num_tokens])
