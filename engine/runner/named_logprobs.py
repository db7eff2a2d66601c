"""Log-probabilities of the token ids that requests name (`SamplingParams.logprob_token_ids`).

Existing operations suffice: `top_logprobs` scores a row's first id, `embedding` gathers the logits of all of them from
a table of single logits, and log p(id) = log p(first) + logit(id) - logit(first).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.engine.contract.sampling_params import MAX_LOGPROB_TOKEN_IDS
from tessera.engine.core.step_batch import SlotInit
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.upload import StepUpload, aligned
from tessera.engine.tensor import Tensor, empty, float32, int32

Array = np.ndarray[Any, Any]


class NamedIds:
    """The ids that the sequences in slots name."""

    def __init__(self) -> None:
        self._by_slot: dict[int, tuple[int, ...]] = {}

    def init_slot(self, init: SlotInit) -> None:
        if init.params.logprob_token_ids:
            self._by_slot[init.slot] = init.params.logprob_token_ids
        else:
            self._by_slot.pop(init.slot, None)

    def of_slots(self, slots: Sequence[int]) -> list[tuple[int, ...]] | None:
        """Per slot; None where no slot names any."""
        if not self._by_slot:
            return None
        found = [self._by_slot.get(slot, ()) for slot in slots]
        return found if any(found) else None


class NamedLogprobs:
    """Scores one step's named ids; buffers are for `num_slots` rows."""

    def __init__(self, ops: Ops, upload: StepUpload, num_slots: int, vocab_size: int) -> None:
        """`upload` has room for `upload_bytes`."""
        self._ops = ops
        self._upload = upload
        self._vocab_size = vocab_size
        self._gathered = empty((num_slots * MAX_LOGPROB_TOKEN_IDS, 1), float32, ops.device)

    @staticmethod
    def upload_bytes(num_slots: int) -> int:
        return aligned(num_slots * int32.itemsize) + aligned(num_slots * MAX_LOGPROB_TOKEN_IDS * int32.itemsize)

    def stage(self, named: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Upload with the step's other arrays -> each row's first id [n], places [T] of all ids in n rows of logits."""
        first = np.array([ids[0] if ids else 0 for ids in named], np.int32)
        places = np.concatenate([np.array(ids, np.int32) + row * self._vocab_size for row, ids in enumerate(named)])
        return self._upload.stage_array(first), self._upload.stage_array(places.astype(np.int32))

    def launch(self, raw_logits: Tensor, staged: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """raw_logits [n, V] -> log-probability of each row's first id [n], logits of all named ids [T, 1]."""
        first, places = staged
        scores, *_ = self._ops.top_logprobs(raw_logits, first, 0)
        table = Tensor(raw_logits.buffer, (raw_logits.size, 1), float32, raw_logits.offset)
        return scores, self._ops.embedding(places, table, out=self._gathered[: places.size])


def read_named(named: list[tuple[int, ...]], scores: Array, logits: Array) -> list[list[float]]:
    """Log-probabilities of each row's ids, from what `launch` gave."""
    found, start = [], 0
    for score, ids in zip(scores.tolist(), named, strict=True):
        row = logits[start : start + len(ids), 0]
        start += len(ids)
        found.append((score + (row - row[0])).tolist() if ids else [])
    return found
