"""Suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.6  # of two names, from 0 to 1, above which one is taken for the other mistyped


def closest(name: str, known: Iterable[str], likeness: float = LIKENESS) -> str | None:
    """The known name that `name` most likely stands for."""
    return next(iter(get_close_matches(name, list(known), 1, likeness)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error's sentence, empty where nothing is close."""
    match = closest(name, known)
    return f"; did you mean {match}?" if match else ""
