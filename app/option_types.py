"""What the command's options accept: each turns an argument's text into a value, or says what is wrong with it."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable


def integer(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, not {text!r}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number from `low` to `high`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:  # false for nan
            raise argparse.ArgumentTypeError(f"must be a number from {low:g} to {high:g}, not {text!r}")
        return value

    return parse


def metric_name(text: str) -> str:
    """An argparse type: what Prometheus accepts as the beginning of a metric's name."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise argparse.ArgumentTypeError(f"must be letters, digits and _, not beginning with a digit, not {text!r}")
    return text


def origin(text: str) -> str:
    """An argparse type: what a browser sends as `Origin`, or *."""
    if text != "*" and not re.fullmatch(r"https?://[^\s/?#@*]+", text):
        raise argparse.ArgumentTypeError(f"must be * or an origin such as https://example.org, not {text!r}")
    return text
