"""Log-probabilities of prompts' own tokens, from the steps that compute them.

The logits at one position are about the token at the next, so a prompt of n tokens has n - 1 of them. Each is
asked for once: what a preemption or a cached prefix makes a step compute again, or not at all, is not asked again.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from tessera.engine.contract.messages import PromptScores
from tessera.engine.core.sequence import Sequence
from tessera.engine.core.step_batch import Int32Array, PromptRows


def gather_prompt_rows(
    rows: Rows[int], sequences: Rows[Sequence], num_scheduled: Rows[int], first_tokens: Int32Array
) -> tuple[PromptRows | None, list[tuple[Sequence, int]]]:
    """Prompt rows to score in a step, for the sequences at `rows`, which are still within their prompts.

    first_tokens [R]: where each sequence's scheduled tokens begin.

    -> the prompt rows, None if there are none; and their sequences in order, with their number of rows. Marks the
    rows as requested (`num_prompt_logprobs`).
    """
    askers: list[tuple[Sequence, int]] = []
    token_indices: list[Int32Array] = []
    next_token_ids: list[Int32Array] = []
    for row in rows:
        sequence = sequences[row]
        if sequence.params.prompt_logprobs is None:
            continue
        start = sequence.num_computed_tokens
        first = max(start, sequence.num_prompt_logprobs)
        stop = min(start + num_scheduled[row], sequence.num_prompt_tokens - 1)
        if first < stop:
            offset = int(first_tokens[row]) - start
            token_indices.append(np.arange(first + offset, stop + offset, dtype=np.int32))
            next_token_ids.append(np.array(sequence.token_ids[first + 1 : stop + 1], np.int32))
            askers.append((sequence, stop - first))
            sequence.num_prompt_logprobs = stop
    if not askers:
        return None, askers
    counts = [sequence.params.prompt_logprobs or 0 for sequence, _ in askers]
    return PromptRows(
        token_indices=np.concatenate(token_indices),
        next_token_ids=np.concatenate(next_token_ids),
        num_logprobs=np.repeat(np.array(counts, np.int32), [count for _, count in askers]),
    ), askers


def keep_prompt_logprobs(askers: Rows[tuple[Sequence, int]], found: Rows[PromptScores]) -> None:
    """Append a step's scores to their sequences, which send them with their first token."""
    pieces = iter(found)
    piece, start = next(pieces, None), 0
    for sequence, count in askers:
        while count and piece is not None:
            stop = min(start + count, len(piece))
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.append(piece.part(start, stop))
            count -= stop - start
            start = stop
            if stop == len(piece):
                piece, start = next(pieces, None), 0
