"""How cost grows, as one picture.

python -m tests.bench --only loads --sweep
python -m tests.bench.growth .out/bench.json tests/bench/growth.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

PANEL = (440, 250)  # width, height
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 34, 40
COLOURS = ("#2f6fed", "#e07b39", "#17804a", "#a04bc5")

Row = dict[str, Any]
Points = list[tuple[float, float]]


def panel(title: str, x_label: str, lines: dict[str, Points]) -> str:
    """Both axes logarithmic; each point carries its value."""
    width, height = PANEL
    xs = sorted({x for points in lines.values() for x, _ in points})
    ys = [y for points in lines.values() for _, y in points if y > 0]
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    bottom, top = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 1e-9)

    def place_x(x: float) -> float:
        return LEFT + 24 + (math.log2(x) - low) / max(high - low, 1e-9) * (width - LEFT - RIGHT - 48)

    def place_y(y: float) -> float:
        return height - BOTTOM - (math.log10(y) - bottom) / max(top - bottom, 1) * (height - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT - 44}" y="18">{escape(title)}</text>']
    for power in range(bottom, top + 1):
        y = place_y(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,g}</text>')
    for x in xs:
        parts.append(f'<text x="{place_x(x):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(LEFT + width) / 2:.0f}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>')
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        for x, y in points:
            parts.append(f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="3" fill="{colour}"/>')
            # The highest line's values stand above it, the others' below theirs where there is room.
            is_highest = y >= max(value for others in lines.values() for place, value in others if place == x)
            stands_above = is_highest or place_y(y) > height - BOTTOM - 16
            label = f"{y / 1000:.1f}k" if y >= 10_000 else f"{y:,.0f}" if y >= 20 else f"{y:.1f}"
            at = place_y(y) - 8 if stands_above else place_y(y) + 16
            parts.append(
                f'<text x="{place_x(x):.1f}" y="{at:.1f}" text-anchor="middle" style="fill:{colour}">{label}</text>'
            )
        right = width - RIGHT - 90 * (len(lines) - 1 - index)
        parts.append(
            f'<text class="name" x="{right}" y="18" text-anchor="end" style="fill:{colour}">{escape(name)}</text>'
        )
    return "".join(parts)


def picture(rows: Sequence[Row]) -> str:
    """Four panels from the rows of a sweep."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_streams = [row for row in rows if row["output_len"] > 16]
    by_length = [row for row in rows if row["output_len"] <= 16]

    def lines(chosen: Sequence[Row], x: str, y: str) -> dict[str, Points]:
        return {model: sorted((row[x], row[y]) for row in chosen if row["model"] == model) for model in models}

    streams = "streams (512 in, 128 out)"
    panels = [
        panel("tokens per second", streams, lines(by_streams, "concurrency", "output_throughput")),
        panel("P99 inter-token latency, ms", streams, lines(by_streams, "concurrency", "p99_itl_ms")),
        panel("median time to first token, ms", streams, lines(by_streams, "concurrency", "median_ttft_ms")),
        panel("time to first token, ms", "prompt tokens (one stream)", lines(by_length, "input_len", "median_ttft_ms")),
    ]
    width, height = PANEL
    placed = [
        f'<g transform="translate({index % 2 * width},{index // 2 * height})">{drawn}</g>'
        for index, drawn in enumerate(panels)
    ]
    style = (
        "text{font:11px system-ui,sans-serif;fill:#667085}text.title{font-size:13px;font-weight:600;fill:#1b2430}"
        "text.name{font-weight:600}.grid{stroke:#e4e7ec}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {2 * height}" width="{2 * width}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(placed)}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=__doc__)
    parser.add_argument("figures", type=Path, help="JSON of `python -m tests.bench --only loads --sweep`")
    parser.add_argument("picture", type=Path, help="SVG to write")
    options = parser.parse_args()
    options.picture.write_text(picture(json.loads(options.figures.read_text())["loads"]))


if __name__ == "__main__":
    main()
