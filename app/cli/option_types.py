"""What the command's options accept: each turns an argument's text into a value, or says what is wrong with it."""

from __future__ import annotations

import argparse
import re


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
