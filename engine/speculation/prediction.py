"""Predicted outputs: a text that the request expects to come back, mostly unchanged."""

from __future__ import annotations

import numpy as np

from tessera.engine.contract.messages import TokenIds
from tessera.engine.speculation.look_up import find_continuations

LONGEST = 8  # last tokens of the completion that are looked for
MAX_GAP = 64  # tokens of the prediction within which short matches count after the last


class PredictionDrafter:
    """Follows a completion through its prediction."""

    def __init__(self, prediction: TokenIds, num_prompt_tokens: int) -> None:
        self._prediction = np.array(prediction, np.int32)
        self._num_prompt_tokens = num_prompt_tokens
        self._place = 0  # in the prediction, of what comes next
        self._num_read = 0  # tokens of the completion

    def propose(self, token_ids: TokenIds, most: int) -> list[int]:
        """At most `most` tokens that may follow; [] where the completion has left the prediction."""
        completion = np.array(token_ids[self._num_prompt_tokens + max(self._num_read - LONGEST, 0) :], np.int32)
        new = completion[min(self._num_read, LONGEST) :]
        self._num_read += len(new)
        prediction, place = self._prediction, self._place
        if np.array_equal(prediction[place : place + len(new)], new):
            self._place = place + len(new)
        elif (found := self._find(completion[-LONGEST:])) is not None:
            self._place = found
        else:
            return []
        proposal: list[int] = prediction[self._place : self._place + most].tolist()
        return proposal

    def _find(self, ending: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int | None:
        """Where the prediction goes on: at a match of two tokens soon after the last place, or of three anywhere."""
        near = self._prediction[self._place : self._place + MAX_GAP]
        places = find_continuations(near, ending, 2, LONGEST)
        if len(places):
            return self._place + int(places[0])
        places = find_continuations(self._prediction, ending, 3, LONGEST)
        return int(places[0]) if len(places) else None
