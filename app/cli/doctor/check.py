"""A check and its result."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "warning", "error"]


class Check(msgspec.Struct, frozen=True):
    """One fact about the machine.

    Attributes:
        group, name: where it is listed.
        status: warning: works, but worse than it could; error: broken, or missing although needed.
        value: what was found, in words.
        advice: what mends it; empty for ok.
    """

    group: str
    name: str
    status: Status
    value: str
    advice: str = ""
