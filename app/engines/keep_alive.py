"""The time that a model stays loaded without requests, as Ollama writes it: 5m, 1h30m, 300, -1."""

from __future__ import annotations

import math
import re

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+")
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
FORM = "a duration such as 5m or 1h30m, seconds, or -1 for ever"
MAX_LENGTH = 64


def seconds_of(text: str) -> float:
    """Seconds; infinite for a negative number or duration. Raises ValueError."""
    text = text.strip()
    is_negative = text.startswith("-")
    size = text.removeprefix("-")
    if len(size) > MAX_LENGTH:
        raise ValueError(FORM)
    if DURATION.fullmatch(size):
        seconds = sum(float(number) * UNITS[unit] for number, unit in PART.findall(size))
    elif re.fullmatch(r"\d+(\.\d+)?", size):
        seconds = float(size)
    else:
        raise ValueError(FORM)
    return math.inf if is_negative else seconds
