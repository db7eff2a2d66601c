"""Numbers in words."""

from __future__ import annotations

SI_UNITS = ("", "k", "M", "G", "T")


def si(value: float) -> str:
    """`value` with three digits and an SI prefix: 1.04 M, 16.1 G."""
    unit = 0
    while value >= 999.5 and unit < len(SI_UNITS) - 1:
        value /= 1000
        unit += 1
    return f"{value:.3g} {SI_UNITS[unit]}"
