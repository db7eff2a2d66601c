"""A plot as inline SVG: two linear axes and a few kinds of marks, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 42


class Plot:
    """Marks are drawn in the order in which they are added; x and y are in the units of the data.

    Args:
        x_range: lowest and highest x.
        y_max: highest y; the lowest is 0.
        description: for screen readers.
        headroom: how far the axis goes beyond `y_max`, as a factor.
    """

    def __init__(
        self,
        x_label: str,
        y_label: str,
        x_range: tuple[float, float],
        y_max: float,
        description: str,
        headroom: float = 1.06,
    ) -> None:
        self._low, high = x_range
        self._x_span = (high - self._low) or 1.0
        self._y_max = y_max * headroom or 1.0
        self._labels = (x_label, y_label)
        self._description = description
        self._marks: list[str] = []

    def bar(self, left: float, right: float, y: float, title: str) -> None:
        x0, x1, y0 = self._x(left), self._x(right), self._y(y)
        self._marks.append(
            f'<rect class="bar" x="{x0 + 0.5:.1f}" y="{y0:.1f}" width="{max(x1 - x0 - 1, 0.8):.1f}" '
            f'height="{self._y(0) - y0:.1f}" rx="1.5"><title>{escape(title)}</title></rect>'
        )

    def line(self, points: Sequence[tuple[float, float]], style: str = "a", *, filled: bool = False) -> None:
        if not points:
            return
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        if filled:
            first, last = self._x(points[0][0]), self._x(points[-1][0])
            floor = f"{self._y(0):.1f}"
            self._marks.append(
                f'<polygon class="area {style}" points="{first:.1f},{floor} {path} {last:.1f},{floor}"/>'
            )
        self._marks.append(f'<polyline class="line {style}" points="{path}"/>')

    def dots(self, points: Sequence[tuple[float, float, str]], style: str = "a", radius: float = 3) -> None:
        """Each with the text that pointing at it shows."""
        self._marks += [
            f'<circle class="dot {style}" cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="{radius:g}">'
            f"<title>{escape(title)}</title></circle>"
            for x, y, title in points
        ]

    def vertical(self, x: float, label: str, row: int = 0) -> None:
        """A marked x; `row` keeps labels of neighbours apart."""
        place = self._x(x)
        anchor = "end" if place > WIDTH - 120 else "start"
        shift = -4 if anchor == "end" else 4
        self._marks.append(
            f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{self._y(0):.1f}"/>'
            f'<text class="mark" x="{place + shift:.1f}" y="{TOP + 6 + 15 * row}" text-anchor="{anchor}">'
            f"{escape(label)}</text>"
        )

    def horizontal(self, y: float, label: str) -> None:
        """A marked y, where the plot reaches so far."""
        if y <= self._y_max:
            place = self._y(y)
            self._marks.append(
                f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>'
                f'<text class="mark" x="{LEFT + 6}" y="{place - 5:.1f}">{escape(label)}</text>'
            )

    def render(self) -> str:
        floor = self._y(0)
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self._description)}">']
        for tick in ticks(0, self._y_max, 5):
            y = self._y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in ticks(self._low, self._low + self._x_span, 7):
            x = self._x(tick)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{floor + 17:.1f}" text-anchor="middle">{number(tick)}</text>'
            )
        parts += self._marks
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor:.1f}" y2="{floor:.1f}"/>')
        x_label, y_label = map(escape, self._labels)
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{x_label}</text>')
        parts.append(f'<text class="label" x="{LEFT - 48}" y="12">{y_label}</text></svg>')
        return "".join(parts)

    def _x(self, value: float) -> float:
        return LEFT + (value - self._low) / self._x_span * (WIDTH - LEFT - RIGHT)

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._y_max * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers within [low, high], about so many."""
    rough = (high - low) / about
    if rough <= 0 or not math.isfinite(rough):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Short: 1.5, 20, 12.5k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.6g}"
