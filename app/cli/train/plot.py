"""The losses of a training as a picture: lines of text, and an SVG file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[int, float]]  # step, loss

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 40
TICKS = 5
COLOURS = ("#2563eb", "#dc2626")


def terminal_plot(points: Points, *, columns: int = 60, rows: int = 8) -> str:
    """A column is the mean of as many steps as it stands for; the ends of the scale stand at the left."""
    if not points:
        return ""
    columns = min(columns, len(points))
    edges = [len(points) * column // columns for column in range(columns + 1)]
    means = [_mean([loss for _, loss in points[a:b]]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    heights = [(mean - low) / ((high - low) or 1) * (rows * 8 - 1) + 1 for mean in means]
    lines = []
    for row in reversed(range(rows)):
        cells = (BLOCKS[min(max(round(height - 8 * row), 0), 8)] for height in heights)
        label = f"{high:8.4f}" if row == rows - 1 else f"{low:8.4f}" if row == 0 else " " * 8
        lines.append(f"{label} {''.join(cells)}")
    return "\n".join(lines)


def svg_plot(title: str, series: dict[str, Points]) -> str:
    """An SVG file with a line for each series that has points."""
    drawn = {name: points for name, points in series.items() if points}
    steps = [step for points in drawn.values() for step, _ in points] or [0]
    losses = [loss for points in drawn.values() for _, loss in points] or [0.0]
    low, high = min(0.0, *losses), max(losses) or 1.0
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def place(step: float, loss: float) -> str:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-size="14" fill="#111">{escape(title)}</text>',
    ]
    for tick in range(TICKS + 1):
        loss = low + (high - low) * tick / TICKS
        step = first + (last - first) * tick / TICKS
        y, x = place(first, loss).split(",")[1], place(step, low).split(",")[0]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dy="4" fill="#444">{loss:.3g}</text>')
        parts.append(f'<text x="{x}" y="{HEIGHT - 16}" text-anchor="middle" fill="#444">{step:.0f}</text>')
    for index, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join(place(step, loss) for step, loss in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        label = WIDTH - RIGHT - 150 * (len(drawn) - index) + 20
        parts.append(f'<text x="{label}" y="22" fill="{colour}">{escape(name)} {points[-1][1]:.4f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
