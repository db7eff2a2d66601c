"""Ways to say one thing, of which some are kept out of training."""

from __future__ import annotations

import re
from dataclasses import dataclass

NEW_LINE = "⏎"  # in a phrasing's line
COURTESIES = re.compile(
    r"\b(hi|hello|hey|there|ok|okay|now|please|pls|kindly|thanks|thank you|so|just|for me"
    r"|i( d| would)? (like|want|need) (you )?to|(can|could|would|will) you)\b"
)


@dataclass(frozen=True)
class Phrasings:
    """Sentences with fields in braces, as `str.format` fills them.

    Attributes:
        held_out: said in the split `phrasings` alone.
    """

    trained: tuple[str, ...]
    held_out: tuple[str, ...]

    def __add__(self, other: Phrasings) -> Phrasings:
        return Phrasings(self.trained + other.trained, self.held_out + other.held_out)


def phrasings(trained: str, held_out: str) -> Phrasings:
    """Of two texts with a phrasing in each line."""
    return Phrasings(_lines(trained), _lines(held_out))


def core(phrasing: str) -> str:
    """The words of a phrasing in lower case, without courtesies; equal for two that count as one."""
    words = " ".join(re.findall(r"\{\w+\}|\w+|[-+*=]", phrasing.lower()))
    return " ".join(COURTESIES.sub("", words).split()) or words


def _lines(text: str) -> tuple[str, ...]:
    lines = (line.strip() for line in text.splitlines())
    return tuple(line.replace(NEW_LINE, "\n") for line in lines if line)
