"""Where each weight of a Hugging Face checkpoint lies in a GGUF file, and in which order its rows do."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tessera.engine.gguf.model import GGUFModel
from tessera.engine.models.gguf.architectures import gguf_architecture
from tessera.engine.models.gguf.keys import MAX_LAYERS, ArchitectureKeys
from tessera.engine.models.gguf.mixtures import num_layers

LAYER_NUMBER = re.compile(r"blk\.(0|[1-9]\d{0,3})\.")
SUFFIX = re.compile(r"\.(weight|bias)")
IMAGE_ROPE = "rope.dimension_sections"
QUERY_OR_KEY = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
SECOND_NORM = "blk.0.attn_norm_2.weight"

Rows = np.ndarray[Any, np.dtype[np.int64]]


class TensorNames:
    """Tensor names of one model.

    Attributes:
        stored: Hugging Face's name to GGUF's; tensors without a place keep theirs, so that they are noticed.
    """

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self._keys = ArchitectureKeys(model.metadata)
        self._architecture = gguf_architecture(model.metadata)
        self._num_layers = num_layers(self._keys) if self._keys.has("nextn_predict_layers") else MAX_LAYERS
        has_second = SECOND_NORM in model.tensors and self._architecture.second_norm
        self._names = self._architecture.second_norm if has_second else self._architecture.names
        self.stored = {found: name for name in model.tensors if (found := self._hugging_face_name(name)) is not None}

    def _hugging_face_name(self, name: str) -> str | None:
        """None for a tensor that no forward pass takes."""
        suffix = name[name.rfind(".") :]
        stem = name.removesuffix(suffix)
        if SUFFIX.fullmatch(suffix) is None:
            return name
        if stem in self._architecture.ignored:
            return None
        layer = LAYER_NUMBER.match(stem)
        if layer is not None and int(layer[1]) >= self._num_layers:
            return None
        if layer is None:
            found = self._names.get(stem)
        else:
            found = self._names.get("blk.{i}." + stem[layer.end() :])
            whole = self._names.get("blk.{i}." + name[layer.end() :])
            if whole is not None:
                return whole.format(i=int(layer[1]))
        if found is None:
            return name
        return (found if layer is None else found.format(i=int(layer[1]))) + suffix

    def row_order(self, name: str) -> Rows | None:
        """Which stored row is each row of the tensor called `name` in GGUF; None where they are in order.

        llama.cpp rotates neighbouring elements of a head, and its converter reorders the rows of queries and keys
        to that end: elements (j, j + D / 2) of a head of D become (2 j, 2 j + 1). Its RoPE of images rotates halves,
        for which it reorders the rows of a model of neighbours the other way round.
        """
        part = QUERY_OR_KEY.fullmatch(name)
        parted = self._architecture.parted_for_images and self._keys.has(IMAGE_ROPE)
        if part is None or not (self._architecture.interleaved or parted):
            return None
        rows = self._model.tensors[name].shape[0 if part[2] == "weight" else -1]
        heads = self._keys.integer("attention.head_count")
        if part[1] == "k":
            heads = self._keys.integer("attention.head_count_kv", heads)
        head_dim = rows // max(heads, 1)
        rotary_dim = self._keys.integer("rope.dimension_count", head_dim)
        if head_dim * heads != rows or rotary_dim > head_dim or rotary_dim % 2:
            return None  # a shape that the loader refuses
        order = np.arange(head_dim)
        order[:rotary_dim] = order[:rotary_dim].reshape((2, -1) if parted else (-1, 2)).T.ravel()
        return np.asarray(np.arange(heads)[:, None] * head_dim + order).ravel()
