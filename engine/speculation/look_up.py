"""Prompt look-up: what followed the same last tokens before is drafted (Saxena 2023, "Prompt Lookup Decoding")."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from tessera.engine.contract.messages import TokenIds

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]
Places: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]

NOWHERE = np.empty(0, np.intp)
MAX_TEXT = 1 << 17  # tokens looked through, from the end: 0.1 ms


class LookUp:
    """Drafts from a sequence's own tokens by its last `shortest` to `longest` ones."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, token_ids: TokenIds, most: int) -> list[int]:
        """At most `most` tokens that may follow; [] if nothing is found."""
        text = np.frombuffer(token_ids, np.int32)[-MAX_TEXT:]
        places = find_continuations(text, text, self._shortest, self._longest)
        return go_on(text[places[-1] :].tolist(), most) if len(places) else []


def go_on(continuation: list[int], most: int) -> list[int]:
    """`most` tokens of a continuation, which begins again where the text ends, as it does in a period."""
    return (continuation * -(-most // len(continuation)))[:most] if continuation else []


def find_continuations(text: Ids, ending: Ids, shortest: int, longest: int) -> Places:
    """Where in `text` the continuations of its longest matches with the end of `ending` begin, ascending.

    A match has `shortest` to `longest` tokens, and at least one behind it.
    """
    longest = min(longest, len(ending))
    if longest < shortest or len(text) < shortest + 1:
        return NOWHERE
    ends = np.flatnonzero(text[:-1] == ending[-1])
    for length in range(2, longest + 1):
        longer = ends[ends >= length - 1]
        longer = longer[text[longer - (length - 1)] == ending[-length]]
        if not len(longer):
            return NOWHERE if length <= shortest else ends + 1
        ends = longer
    return ends + 1
