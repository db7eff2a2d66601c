"""The one encoder forward: embeddings, then layers in which tokens see both sides of their text.

As in BERT (Devlin et al. 2019), and with norms before the halves, RoPE and local attention as in ModernBERT (Warner et
al. 2024). Nothing is allocated and nothing crosses between host and device inside `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.engine.models.blocks import MLP, HalfInput, ResidualAdd, make_norm
from tessera.engine.models.buffers import Inner
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.specs import LayerSpec, MLPSpec
from tessera.engine.models.weights.weights import LayerWeights, MLPWeights, Weights
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Device, Tensor, empty


class EncoderBuffers:
    """Activations of the largest pass, T tokens. Raises: OutOfMemoryError."""

    def __init__(self, config: ModelConfig, dtype: np.dtype[Any], device: Device, max_tokens: int) -> None:
        def rows(*widths: int) -> Tensor:
            return empty((max_tokens, max(widths)), dtype, device)

        attentions, mlps = [layer.attention for layer in config.layers], [layer.mlp for layer in config.layers]
        self.hidden = rows(config.hidden_size)
        self.update = rows(config.hidden_size)  # a layer half's output, not yet added
        self.normed = self.update  # a half's input is no longer needed when its output is there
        self._inner = {
            "qkv": rows(*(attention.qkv_size for attention in attentions)),
            "attended": rows(*(attention.q_size for attention in attentions)),
            "up": rows(*(mlp.up_size for mlp in mlps)),
            "activated": rows(*(mlp.inner_size for mlp in mlps)),
        }

    def inner(self, name: Inner, num_rows: int, width: int) -> Tensor:
        """An intermediate [num_rows, width] of one layer."""
        memory = self._inner[name]
        return Tensor(memory.buffer, (num_rows, width), memory.dtype, memory.offset)


class Encoder:
    """A model ready to run."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, rope_tables: Sequence[Tensor] = ()) -> None:
        """`rope_tables`: [P, rotary_dim] float32 for each of `config.ropes`."""
        self.config = config
        self.ops = ops
        self._layers = [
            EncoderLayer(spec, layer, ops, rope_tables)
            for spec, layer in zip(config.layers, weights.layers, strict=True)
        ]
        norm = make_norm(config.embedding_norm, weights.embedding_norm)
        assert norm is not None, "an encoder's embeddings are normalised"
        self._embedding, self._embedding_norm = weights.embedding, norm
        self._token_types, self._positions = weights.token_type_embedding, weights.position_embedding
        self._final_norm = make_norm(config.final_norm, weights.final_norm)

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

        input_ids, positions and token_types [T] int32, the last two as rows of their tables where there are such;
        cu_seqlens [R + 1] int32 and max_seqlen as in `bidirectional_attention`. The result lives in `buffers` until
        the next pass.
        """
        ops, num_tokens = self.ops, input_ids.shape[0]
        hidden = ops.lookup(input_ids, self._embedding, out=buffers.hidden[:num_tokens])
        for ids, table in ((token_types, self._token_types), (positions, self._positions)):
            if table is not None:
                ops.add(hidden, ops.lookup(ids, table, out=buffers.update[:num_tokens]), out=hidden)
        self._embedding_norm.apply(ops, hidden, out=hidden)
        for layer in self._layers:
            layer.forward(hidden, cu_seqlens, max_seqlen, buffers)
        return hidden if self._final_norm is None else self._final_norm.apply(ops, hidden, out=hidden)


class EncoderLayer:
    """Attention, then the MLP."""

    def __init__(self, spec: LayerSpec, weights: LayerWeights, ops: Ops, rope_tables: Sequence[Tensor]) -> None:
        attention, mlp = spec.attention, spec.mlp
        self._spec = attention
        self._ops = ops
        self._cos_sin = None if attention.rope is None else rope_tables[attention.rope]
        before = make_norm(attention.norms.before, weights.attention.norms.before)
        self._qkv = HalfInput(before, weights.attention.qkv, ops)
        assert isinstance(mlp, MLPSpec), "encoders have no mixtures"
        assert isinstance(weights.mlp, MLPWeights), "an MLP has its weights"
        self._mlp = MLP(mlp, weights.mlp, ops, make_norm(mlp.norms.before, weights.mlp.norms.before))
        self._attention_add = ResidualAdd(
            spec, attention.norms, weights.attention.norms, weights.attention.out, ops, None
        )
        self._mlp_add = ResidualAdd(spec, mlp.norms, weights.mlp.norms, weights.mlp.down, ops, None)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, max_seqlen: int, buffers: EncoderBuffers) -> None:
        """hidden [T, H] becomes the layer's output."""
        spec, num_tokens = self._spec, hidden.shape[0]
        qkv = self._qkv.project(hidden, buffers, buffers.inner("qkv", num_tokens, spec.qkv_size))
        attended = self._ops.bidirectional_attention(
            qkv,
            cu_seqlens,
            max_seqlen,
            num_heads=spec.num_heads,
            scale=spec.scale,
            cos_sin=self._cos_sin,
            reach=spec.sliding_window,
            out=buffers.inner("attended", num_tokens, spec.q_size),
        )
        self._attention_add.add(attended, hidden, buffers)
        self._mlp_add.add(self._mlp.activate(hidden, buffers), hidden, buffers)
