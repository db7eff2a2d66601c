"""Sizes and times in words."""

from __future__ import annotations

from tessera.app.units import si

PERIODS = ((86400 * 365, "year"), (86400 * 30, "month"), (86400, "day"), (3600, "hour"), (60, "minute"))


def size(nbytes: float) -> str:
    """Three digits with a decimal unit, as disks and hubs count: 1.52 GB."""
    return f"{si(nbytes)}B"


def count(number: float) -> str:
    """596 M, 8.03 B."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f}"


def ago(seconds: float) -> str:
    """3 days ago."""
    for length, name in PERIODS:
        number = int(seconds // length)
        if number:
            return f"{number} {name}{'s'[: number > 1]} ago"
    return "just now"
