"""Finding stop strings in a growing text without ever giving out a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Takes text piece by piece and gives out what can no longer belong to a stop string.

    The match that ends first wins, and of those the longest: the result does not depend on how the
    text was cut into pieces of whole tokens.

    Attributes:
        stopped: a stop string was found; what followed it is dropped.
        found: the stop string that was found.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False
        self.found: str | None = None

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def match_text(self, text: str) -> str:
        """Text that may be shown now. Call no more once `stopped`."""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            self.stopped = True
            self._held = ""
            start, end = match
            self.found = text[start:end]
            return text[:end] if self._include_stop else text[:start]
        keep = self._partial_match(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[1]):
                best = (start, start + len(stop))
        return best

    def _partial_match(self, text: str) -> int:
        """Where the earliest unfinished stop string begins; the text's length if there is none."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop)))
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if start >= 0:
                earliest = min(earliest, start)
        return earliest
