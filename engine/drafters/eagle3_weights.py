"""Weights of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.engine.contract.errors import ConfigError
from tessera.engine.drafters.eagle3_config import NUM_FEATURES, Eagle3Config
from tessera.engine.formats import LinearWeight
from tessera.engine.models.weights.safetensors import Checkpoint
from tessera.engine.models.weights.weights import (
    AttentionWeights,
    HalfNormWeights,
    LayerWeights,
    MLPWeights,
    NormWeights,
    Weights,
)
from tessera.engine.tensor import Device, Tensor, from_numpy

Array = np.ndarray[Any, Any]
Read = Callable[[str, tuple[int, ...]], Array]

DUMMY_STD = 0.02
SPELLINGS = (("model.", ""), ("layers.0.", "midlayer."))  # beginnings of names, and what stands for them
# Of no use to a head that drafts: the way back from `d2t`, and what training needs.
NEEDLESS = ("t2d", "mask_hidden", "verifier_norm.weight", "verifier_lm_head.weight")
ROTARY = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Eagle3Weights:
    """H hidden size, V' vocabulary of drafts.

    Attributes:
        layers: of the head as a model; its qkv is of embeddings alone.
        feature_qkv: [(Hq + 2 Hkv) * D, H] of features.
        feature_norm: before that.
        combine: [H, H] of each of the hidden states that make a feature.
        token_ids: [V', 1] int32, the token that each of V' stands for; None: itself.
    """

    layers: Weights
    feature_qkv: LinearWeight
    feature_norm: Tensor
    combine: tuple[LinearWeight, ...]
    token_ids: Tensor | None

    def extra(self) -> list[LinearWeight]:
        """Of products, beside those of `layers`."""
        return [self.feature_qkv, *self.combine]

    @property
    def nbytes(self) -> int:
        extra = sum(tensor.nbytes for weight in self.extra() for tensor in weight.tensors())
        return self.layers.nbytes + extra + self.feature_norm.nbytes

    @property
    def num_parameters(self) -> int:
        extra = sum(weight.num_parameters for weight in self.extra())
        return self.layers.num_parameters + extra + self.feature_norm.size


def load_eagle3(
    config: Eagle3Config, dtype: np.dtype[Any], device: Device, embedding: LinearWeight, vocab_size: int
) -> Eagle3Weights:
    """From the folder. `embedding` is the served model's, of `vocab_size` tokens, for a head without one.

    Raises: ConfigError naming a tensor that is missing or of another shape; ModelError.
    """
    checkpoint = Checkpoint(config.folder)
    unread = {_name_of(name): name for name in checkpoint.names}

    def read(name: str, shape: tuple[int, ...]) -> Array:
        if name not in unread:
            raise ConfigError(f"the EAGLE-3 head {config.folder} has no tensor {name}")
        found = unread.pop(name)
        if checkpoint.shape(found) != shape:
            raise ConfigError(
                f"the EAGLE-3 head {config.folder}: {found} has the shape {list(checkpoint.shape(found))}, not "
                f"{list(shape)}"
            )
        return checkpoint.tensor(found)

    if "embed_tokens.weight" in unread:
        values = read("embed_tokens.weight", (vocab_size, config.model.hidden_size))
        embedding = LinearWeight.of(_on(device, values, dtype))
    token_ids = None
    if "d2t" in unread:
        steps = read("d2t", (config.model.vocab_size,)).astype(np.int64)
        named = np.arange(len(steps)) + steps
        if named.min() < 0 or named.max() >= vocab_size:
            raise ConfigError(
                f"the EAGLE-3 head {config.folder}: d2t names tokens beyond the {vocab_size} that there are"
            )
        token_ids = from_numpy(named.astype(np.int32)[:, None], device)
    elif config.model.vocab_size != vocab_size:
        raise ConfigError(f"the EAGLE-3 head {config.folder} has no tensor d2t, which says what its tokens stand for")
    weights = build_eagle3(config, dtype, device, embedding, token_ids, read)
    others = sorted(found for name, found in unread.items() if name not in NEEDLESS and not name.endswith(ROTARY))
    if others:
        raise ConfigError(f"the EAGLE-3 head {config.folder} is of another kind: its tensor {others[0]} has no use")
    return weights


def dummy_eagle3(
    config: Eagle3Config, dtype: np.dtype[Any], device: Device, embedding: LinearWeight, seed: int
) -> Eagle3Weights:
    """Random numbers; drafts are of the first tokens."""
    random = np.random.default_rng(seed)

    def read(name: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return random.standard_normal(shape, np.float32) * np.float32(DUMMY_STD)

    token_ids = from_numpy(np.arange(config.model.vocab_size, dtype=np.int32)[:, None], device)
    return build_eagle3(config, dtype, device, embedding, token_ids, read)


def build_eagle3(
    config: Eagle3Config,
    dtype: np.dtype[Any],
    device: Device,
    embedding: LinearWeight,
    token_ids: Tensor | None,
    read: Read,
) -> Eagle3Weights:
    hidden, spec = config.model.hidden_size, config.model.layers[0]
    attention, inner = spec.attention, spec.mlp.inner_size
    kv_size = attention.num_kv_heads * attention.head_dim

    def vector(name: str) -> Tensor:
        return _on(device, read(name, (hidden,)), dtype)

    def matrix(*parts: Array) -> LinearWeight:
        return LinearWeight.of(_on(device, np.concatenate(parts), dtype))

    rows = (("q", attention.q_size), ("k", kv_size), ("v", kv_size))
    both = [read(f"midlayer.self_attn.{name}_proj.weight", (size, 2 * hidden)) for name, size in rows]
    fc = read("fc.weight", (hidden, NUM_FEATURES * hidden))
    layer = LayerWeights(
        AttentionWeights(
            qkv=matrix(*(each[:, :hidden] for each in both)),
            out=matrix(read("midlayer.self_attn.o_proj.weight", (hidden, attention.q_size))),
            norms=HalfNormWeights(before=NormWeights(vector("midlayer.input_layernorm.weight"))),
        ),
        MLPWeights(
            up=matrix(*(read(f"midlayer.mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))),
            down=matrix(read("midlayer.mlp.down_proj.weight", (hidden, inner))),
            norms=HalfNormWeights(before=NormWeights(vector("midlayer.post_attention_layernorm.weight"))),
        ),
    )
    return Eagle3Weights(
        layers=Weights(
            embedding=embedding,
            layers=(layer,),
            final_norm=NormWeights(vector("norm.weight")),
            lm_head=matrix(read("lm_head.weight", (config.model.vocab_size, hidden))),
        ),
        feature_qkv=matrix(*(each[:, hidden:] for each in both)),
        feature_norm=vector("midlayer.hidden_norm.weight"),
        combine=tuple(matrix(fc[:, part * hidden : (part + 1) * hidden]) for part in range(NUM_FEATURES)),
        token_ids=token_ids,
    )


def _name_of(tensor: str) -> str:
    """Its name in the form of the paper's authors."""
    for beginning, instead in SPELLINGS:
        if tensor.startswith(beginning):
            tensor = instead + tensor.removeprefix(beginning)
    return tensor


def _on(device: Device, values: Array, dtype: np.dtype[Any]) -> Tensor:
    return from_numpy(np.ascontiguousarray(values.astype(np.float32)).astype(dtype), device)
