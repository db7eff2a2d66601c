"""The activations of a decoder's step, in memory allocated once."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from tessera.engine.models.config import ModelConfig
from tessera.engine.models.mixture.buffers import dense_mlps, mixture_widths, most_experts
from tessera.engine.tensor import Buffer, Device, Tensor, float32, int32

ALIGNMENT = 256

Inner = Literal[
    "qkv",
    "queries",
    "attended",
    "up",
    "activated",
    "last_queries",
    "router_logits",
    "experts",
    "expert_weights",
    "expert_offsets",
    "expert_pairs",
    "expert_places",
    "expert_up",
    "expert_activated",
    "expert_rows",
    "shared",
    "shared_gate",
    "own_ids",
]


class StepBuffers:
    """Activations of the largest step, T tokens and S rows of logits, in one allocation.

    Where a layer's halves run one after the other, their intermediates share memory.

    Raises: OutOfMemoryError.
    """

    residual: Tensor  # [T, H] the stream that layers add to
    normed: Tensor  # [T, H] a layer half's input
    update: Tensor  # [T, H] what a half adds, where it is more than its last product; else of no rows
    # [T, H] the stream between the halves of layers with `leaves_sum`, or [1, H] where ranks share them; else none
    half_residual: Tensor
    last_residual: Tensor  # [S, H] rows that are projected to logits
    last_normed: Tensor  # [S, H]
    own_logits: Tensor  # [S, V] float32, of a rank's part of the head
    logits: Tensor  # [S, V] float32, of the whole head on rank 0; else the same
    buffer: Buffer  # all of them

    def __init__(
        self,
        config: ModelConfig,
        dtype: np.dtype[Any],
        device: Device,
        *,
        max_tokens: int,
        max_logits: int,
        shared: bool = False,
        whole_vocab: int | None = None,
    ) -> None:
        """`shared`: for a decoder that ranks share, which sum their updates before they add them. `whole_vocab`: of all
        ranks' logits, where they are gathered here."""
        places = _layout(config, dtype, max_tokens, max_logits, shared=shared, whole_vocab=whole_vocab)
        self.nbytes = _end(places)
        self.buffer = device.allocate(self.nbytes)
        self._places = places
        for name in (
            "residual",
            "normed",
            "update",
            "half_residual",
            "last_residual",
            "last_normed",
            "own_logits",
            "logits",
        ):
            place = places[name]
            tensor = Tensor(self.buffer, (place.rows, place.width), place.dtype, place.offset)
            setattr(self, name, tensor)

    def inner(self, name: Inner, num_rows: int, width: int) -> Tensor:
        """An intermediate [num_rows, width] of one layer."""
        place = self._places[name]
        return Tensor(self.buffer, (num_rows, width), place.dtype, place.offset)


def buffer_bytes(config: ModelConfig, dtype: np.dtype[Any], *, max_tokens: int, max_logits: int) -> int:
    """Bytes of `StepBuffers`."""
    return _end(_layout(config, dtype, max_tokens, max_logits, shared=False, whole_vocab=None))


class _Place(NamedTuple):
    rows: int
    width: int
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize


def _end(places: dict[str, _Place]) -> int:
    return max(place.offset + place.nbytes for place in places.values())


def _layout(
    config: ModelConfig,
    dtype: np.dtype[Any],
    max_tokens: int,
    max_logits: int,
    *,
    shared: bool,
    whole_vocab: int | None,
) -> dict[str, _Place]:
    hidden, layers = config.hidden_size, config.layers
    q_size = max(layer.attention.q_size for layer in layers)
    qkv_size = max(layer.attention.qkv_size for layer in layers)
    attention = {"qkv": qkv_size, "queries": q_size, "attended": q_size}
    mlps = dense_mlps(layers)
    mlp = {
        "up": max((mlp.up_size for mlp in mlps), default=0),
        "activated": max((mlp.inner_size for mlp in mlps), default=0),
    }
    halves = [(layer, half.norms) for layer in layers for half in (layer.attention, layer.mlp)]
    has_updates = shared or not all(layer.adds_product(norms) for layer, norms in halves)
    places: dict[str, _Place] = {}

    def allot(widths: dict[str, int], rows: int, dtype: np.dtype[Any], offset: int) -> int:
        """Place these one after the other from `offset`; returns their end."""
        for name, width in widths.items():
            places[name] = _Place(rows, width, dtype, offset)
            offset += -(-places[name].nbytes // ALIGNMENT) * ALIGNMENT
        return offset

    end = allot({"residual": hidden, "normed": hidden}, max_tokens, dtype, 0)
    end = allot({"update": hidden}, max_tokens if has_updates else 0, dtype, end)
    leaves_sum = not shared and any(layer.leaves_sum for layer in layers)
    end = allot({"half_residual": hidden}, max_tokens if leaves_sum else int(shared), dtype, end)
    end_of_attention = allot(attention, max_tokens, dtype, end)
    together = any(layer.parallel for layer in layers)
    end_of_mlp = allot(mlp, max_tokens, dtype, end_of_attention if together else end)
    for name, (width, kind) in mixture_widths(layers, hidden, dtype).items():
        end_of_mlp = allot({name: width}, max_tokens, kind, end_of_mlp)
    if num_experts := most_experts(layers):
        end_of_mlp = allot({"expert_offsets": num_experts + 1}, 1, int32, end_of_mlp)
    end = max(end_of_attention, end_of_mlp)
    last = {"last_residual": hidden, "last_normed": hidden, "last_queries": q_size}
    end = allot(last, max_logits, dtype, end)
    if shared:
        end = allot({"own_ids": 1}, max_tokens, int32, end)
    end = allot({"own_logits": config.vocab_size}, max_logits, float32, end)
    places["logits"] = places["own_logits"]
    if whole_vocab is not None:
        allot({"logits": whole_vocab}, max_logits, float32, end)
    return places
