"""A step's prompt tokens scored by the logits before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tessera.engine.contract.messages import PromptScores
from tessera.engine.contract.sampling_params import MAX_LOGPROBS
from tessera.engine.models.buffers import StepBuffers
from tessera.engine.models.decoder import Decoder
from tessera.engine.tensor import Tensor

LogprobTensors = tuple[Tensor, Tensor, Tensor, Tensor]  # what `top_logprobs` gives
Int32Array = np.ndarray[Any, np.dtype[np.int32]]


def launch_prompt_logprobs(
    decoder: Decoder,
    buffers: StepBuffers,
    token_indices: Tensor,
    next_token_ids: Tensor,
    counts: Int32Array,
    *,
    score: bool = True,
) -> list[LogprobTensors]:
    """Launch the scoring of a step's tokens at token_indices [P] int32, right after its forward.

    In pieces of the logits buffer's size, which they overwrite. counts [P] are the alternatives of each; a row that
    reports the whole vocabulary makes no other row do so. Without `score` the logits are made alone, which another rank
    scores.
    """
    max_rows, vocab_size = buffers.logits.shape
    pieces = []
    for start, stop in _pieces(counts > MAX_LOGPROBS, max_rows):
        logits = decoder.gather(decoder.project(token_indices[start:stop], buffers), buffers)
        if not score:
            continue
        k = min(int(counts[start:stop].max()), vocab_size)
        pieces.append(decoder.ops.top_logprobs(logits, next_token_ids[start:stop], k))
    return pieces


def _pieces(kinds: np.ndarray[Any, np.dtype[np.bool_]], max_rows: int) -> Iterator[tuple[int, int]]:
    """Runs of equal kinds, of at most max_rows rows each."""
    bounds = [0, *(np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist(), len(kinds)]
    for begin, end in pairwise(bounds):
        for start in range(begin, end, max_rows):
            yield start, min(start + max_rows, end)


def read_prompt_logprobs(
    pieces: Sequence[LogprobTensors], next_token_ids: Int32Array, counts: Int32Array
) -> list[PromptScores]:
    """Of all rows in order, with as many alternatives as counts [P] says, once the device is done."""
    found: list[PromptScores] = []
    begin = 0
    for piece in pieces:
        chosen, ranks, top_ids, top_values = (tensor.numpy() for tensor in piece)
        end = begin + len(chosen)
        changes = np.flatnonzero(np.diff(counts[begin:end])) + 1
        for start, stop in pairwise([0, *changes.tolist(), len(chosen)]):
            count = int(counts[begin + start])
            found.append(
                PromptScores(
                    next_token_ids[begin + start : begin + stop].astype(np.int32).tobytes(),
                    chosen[start:stop].astype(np.float32).tobytes(),
                    ranks[start:stop].astype(np.int32).tobytes(),
                    count,
                    top_ids[start:stop, :count].astype(np.int32).tobytes(),
                    top_values[start:stop, :count].astype(np.float32).tobytes(),
                )
            )
        begin = end
    return found
