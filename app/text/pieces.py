"""Long texts in pieces whose tokens are those of the whole text, so that several threads make them."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set

from tokenizers import AddedToken

MIN_PIECE_CHARS = 2**12
WINDOW_CHARS = 2**14  # looked through at a time: a search keeps the interpreter's lock
MAX_TAKEN_OUT = 2**12  # tokens, whose pattern is compiled in 0.2 s; where there are more, texts stay whole


class PieceCutter:
    """Cuts texts in front of tokens that the `tokenizers` library takes out of a text before all else.

    What stands between two of them becomes tokens by itself. Of tokens that take spaces beside them along, that must be
    whole words, or that are looked for in the normalised text alone, that is not so.
    """

    def __init__(self, added: Iterable[AddedToken]) -> None:
        taken_out = [token for token in added if not token.normalized and token.content]
        self._contents = {token.content for token in taken_out}
        self._separators = {
            token.content for token in taken_out if not (token.single_word or token.lstrip or token.rstrip)
        }
        self._max_chars = max(map(len, self._contents), default=0)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_longest_of(self._contents))

    def cut(self, text: str, min_chars: int = MIN_PIECE_CHARS) -> list[str]:
        """At least `min_chars` each, but for the last; each but the first begins with such a token."""
        if not self._separators or len(self._contents) > MAX_TAKEN_OUT:
            return [text]
        pieces, begin = [], 0
        for found in self._taken_out(text):
            if found.start() - begin >= min_chars and found[0] in self._separators:
                pieces.append(text[begin : found.start()])
                begin = found.start()
        return [*pieces, text[begin:]]

    def _taken_out(self, text: str) -> Iterator[re.Match[str]]:
        begin = 0
        while begin < len(text):
            end = begin + WINDOW_CHARS  # of where matches begin
            for found in self._pattern.finditer(text, begin, end + self._max_chars):
                if found.start() >= end:
                    break
                yield found
                begin = found.end()
            begin = max(begin, end)


def _longest_of(words: Set[str]) -> str:
    """A pattern of the longest of these words that a text has at a place; what they begin with alike is read once."""
    rests: defaultdict[str, set[str]] = defaultdict(set)
    for word in words - {""}:
        rests[word[0]].add(word[1:])
    if not rests:
        return ""
    branches = "|".join(re.escape(first) + _longest_of(rest) for first, rest in sorted(rests.items()))
    return f"(?:{branches}){'?' if '' in words else ''}"
