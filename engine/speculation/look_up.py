"""Prompt look-up: what followed the same last tokens before is drafted (Saxena 2023, "Prompt Lookup Decoding")."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from tessera.engine.contract.messages import TokenIds

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

MAX_TEXT = 1 << 17  # tokens looked through, from the end: 0.1 ms


class LookUp:
    """Drafts from a sequence's own tokens by its last `shortest` to `longest` ones."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, token_ids: TokenIds, most: int) -> list[int]:
        """At most `most` tokens that may follow; [] if nothing is found."""
        text = np.frombuffer(token_ids, np.int32)[-MAX_TEXT:]
        end = find_continuation(text, text, self._shortest, self._longest, most)
        return [] if end is None else text[end : end + most].tolist()


def find_continuation(text: Ids, ending: Ids, shortest: int, longest: int, most: int) -> int | None:
    """Where in `text` the continuation of its longest match with the end of `ending` begins; None without a match.

    A match has `shortest` to `longest` tokens, and at least one behind it. Of equally long ones it is the last that
    has `most` tokens behind it, or else the first.
    """
    longest = min(longest, len(ending))
    if longest < shortest or len(text) < shortest + 1:
        return None
    ends = np.flatnonzero(text[:-1] == ending[-1])
    for length in range(2, longest + 1):
        longer = ends[ends >= length - 1]
        longer = longer[text[longer - (length - 1)] == ending[-length]]
        if not len(longer):
            if length <= shortest:
                return None
            break
        ends = longer
    if not len(ends):
        return None
    with_room = ends[ends + most < len(text)]
    return int(with_room[-1] if len(with_room) else ends[0]) + 1
