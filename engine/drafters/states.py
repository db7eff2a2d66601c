"""Heads that draft from the served model's hidden states.

The served model leaves a feature of each of its tokens in a part of the KV cache. Entry p of a head reads feature p
and the embedding of token p + 1, attends to the entries up to its own, and says token p + 2. For want of a feature, its
next step reads what it had itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.kv_cache import KVCache
from tessera.engine.ops.interface import AttentionMetadata, HeadTransform, Ops
from tessera.engine.runner.model_runner import ModelRunner, Progress
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.speculation.draft_keys import DraftLimits
from tessera.engine.tensor import Buffer, Device, Tensor, empty

SHIFT = 1  # an entry reads the token behind its own
NOT_ROTATED = HeadTransform(None, None, None, 0.0)
Places = np.ndarray[Any, np.dtype[np.int32]]
NO_PLACES: Places = np.empty(0, np.int32)


class FeaturePlaces(NamedTuple):
    """Of a step: `feature_rows`, where its tokens' features are; `next_places` [S], where what stands for features of
    the next step's tokens goes, -1: nowhere."""

    feature_rows: Places
    next_places: Places


class StateDrafter(DraftModel):
    """Runs a head; see `DraftRunner`. `self._weights` are its weights.

    Features lie in blocks as keys and values do, a half of each feature as keys and a half as values of as many heads:
    what stores keys stores them, and what looks up embeddings reads them.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, device: Device, ops: Ops) -> None:
        """`model`: the head as a model of one layer, of the served one's hidden size: a multiple of two heads."""
        super().__init__(config, model, device, ops)
        self._spec = model.layers[0].attention
        self._num_halves = model.hidden_size // (2 * self._spec.head_dim)  # heads that hold half a feature

    @property
    def block_bytes(self) -> int:
        return super().block_bytes + self.block_size * self.model.hidden_size * self._dtype.itemsize

    @property
    def kept_planes(self) -> list[Tensor]:
        return [self._features[0], self._features[1]]

    @property
    def limits(self) -> DraftLimits:
        """It reads accepted tokens again, with their features in the place of what it had itself."""
        return replace(super().limits, shift=SHIFT, caught_up=1 + self._drafts.shape[0], rereads=True)

    @property
    def scratch(self) -> list[Buffer]:
        return [self._buffers.buffer, self.kv_cache.planes[0].buffer, self._features.buffer]

    def load(self, served: ModelRunner, progress: Progress | None) -> None:
        super().load(served, progress)
        hidden = self.model.hidden_size
        self._feature = empty((served.max_step_tokens, hidden), self._dtype, self.device)
        self._embedded = empty((self._buffer_tokens, hidden), self._dtype, self.device)

    def _allocate(self, num_kv_blocks: int) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.kv_cache = KVCache(self._own, num_kv_blocks, self.block_size, self._kv_format, self.device)
        shape = (2, num_kv_blocks, self._num_halves, self.block_size, self._spec.head_dim)
        self._features = empty(shape, self._dtype, self.device)
        keys = np.arange(self._num_halves, dtype=np.int32) * np.int32(self.block_size)
        num_keys = num_kv_blocks * self._num_halves * self.block_size
        self._rows_of_slot = np.concatenate([keys, keys + np.int32(num_keys)])
        self.kv_cache_bytes = self.kv_cache.nbytes + self._features.nbytes

    @abstractmethod
    def allocate(self, served: ModelRunner) -> None:
        """Also tap what features are made of."""
        super().allocate(served)

    def _store(self, features: Tensor, metadata: AttentionMetadata) -> None:
        """features [T, H] in the places that `metadata` has for keys."""
        keys, values = self._features[0], self._features[1]
        self.ops.rope_and_store(features, keys, values, metadata, NOT_ROTATED, num_heads=0)

    # -- a step of the head ---------------------------------------------------------------------

    def _more_inputs(self, shape: StepShape) -> Mapping[str, int]:
        return {"feature_rows": shape.num_tokens * 2 * self._num_halves, "next_places": shape.num_sampled}

    def _more_of(self, batch: StepBatch) -> FeaturePlaces:
        return FeaturePlaces(
            self._rows_of(batch.slot_mapping), NO_PLACES if batch.next_places is None else batch.next_places
        )

    def _rows_of(self, slots: Places) -> Places:
        """The rows of `_features`, seen as rows of a head, of the features in these slots; -1 of slots below 0."""
        firsts = slots + slots // self.block_size * np.int32((self._num_halves - 1) * self.block_size)
        rows: Places = firsts[:, None] + self._rows_of_slot
        if slots.min(initial=0) < 0:
            rows[slots < 0] = -1
        return rows.ravel()

    def _read_inputs(self, inputs: StepInputs, out: Tensor) -> tuple[Tensor, Tensor]:
        """The features of the step's tokens in `out` [T, H], and the tokens' embeddings [T, H]."""
        ops, num_tokens, head_dim = self.ops, inputs.shape.num_tokens, self._spec.head_dim
        rows = inputs.more["feature_rows"]
        table = self._features.view(self._features.size // head_dim, head_dim)
        ops.embedding(rows, table, out=out.view(rows.size, head_dim))
        embedded = self._embedded[:num_tokens]
        return out, ops.lookup(
            inputs.input_ids, self._weights.embedding, sampled=inputs.sampled or self._newest, out=embedded
        )

    def _chosen_rows(self, stream: Tensor, inputs: StepInputs) -> Tensor:
        """Those of stream [T, H] that logits are made of."""
        if inputs.shape.is_decode:
            return stream
        out = self._buffers.last_residual[: inputs.shape.num_sampled]
        return self.ops.embedding(inputs.logits_indices, stream, out=out)

    def _store_for_next(self, features: Tensor, inputs: StepInputs) -> None:
        """Store features [S, H] of the sampled sequences for the next step to read."""
        places = inputs.more["next_places"]
        self._store(features, replace(inputs.attention, positions=places, slot_mapping=places))
