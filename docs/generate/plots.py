"""Plots of the figures in `docs/figures/serving.json`."""

from __future__ import annotations

import math

from docs.generate.figures import MODELS, README_STREAMS, Row, load, number, serving
from docs.generate.svg import Palette, line, picture, rect, text

Points = list[tuple[float, float]]

BARS = (420, 300)  # width and height of one model's bars
PANEL = (440, 260)
LEFT, RIGHT, TOP, BOTTOM = 60, 18, 52, 46


# -- throughput beside the reference ------------------------------------------------------------------


def throughput(palette: Palette) -> str:
    """Bars by streams, a panel for each model."""
    width, height = BARS
    parts = [
        text(24, 32, "Output tokens per second", kind="head"),
        rect(2 * width - 212, 22, 12, 12, palette.accent),
        text(2 * width - 194, 32, "Tessera", kind="name"),
        rect(2 * width - 124, 22, 12, 12, palette.second),
        text(2 * width - 106, 32, serving()["loads"]["reference"], kind="name"),
    ]
    for index, model in enumerate(MODELS):
        parts += [f'<g transform="translate({index * width},40)">', *_bars(palette, model), "</g>"]
    total = height + 68
    parts.append(text(24, total - 14, _caption(), size=11.5))
    title = f"Output tokens per second of Tessera and {serving()['loads']['reference']}"
    return picture(palette, 2 * width, total, title, parts)


def _caption() -> str:
    part = serving()["loads"]
    return (
        f"{part['device']}, {part['dtype']}, streamed over HTTP; 512 tokens in, 256 out (1 stream: 128 in). "
        f"{part['date']}, commit {part['commit']}."
    )


def _bars(palette: Palette, model: str) -> list[str]:
    width, height = BARS
    rows = [load(model, streams) for streams in README_STREAMS]
    highest = max(row["output_throughput"] for row in rows)
    floor, room = height - 52, height - 52 - 48
    group = (width - 48) / len(rows)
    bar = 34
    parts = [text(24, 24, MODELS[model], kind="name"), line([(24, floor), (width - 24, floor)], palette.edge)]
    for index, row in enumerate(rows):
        middle = 24 + group * (index + 0.5)
        ours, theirs = row["output_throughput"], row["vllm_throughput"]
        for value, x, fill, kind in (
            (ours, middle - bar - 2, palette.accent, "num name"),
            (theirs, middle + 2, palette.second, "num"),
        ):
            tall = max(value / highest * room, 2)
            parts.append(rect(x, floor - tall, bar, tall, fill))
            parts.append(text(x + bar / 2, floor - tall - 6, _short(value), kind=kind, anchor="middle", size=11))
        streams = f"{row['concurrency']} stream{'s' if row['concurrency'] > 1 else ''}"
        parts.append(text(middle, floor + 19, streams, anchor="middle"))
        parts.append(
            text(middle, floor + 37, f"{ours / theirs:.1f}x", kind="num", anchor="middle", fill=palette.accent)
        )
    return parts


def _short(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 10_000 else number(round(value))


# -- how cost grows -----------------------------------------------------------------------------------


def growth(palette: Palette) -> str:
    """Four panels: throughput, latency and first tokens against streams and prompt lengths."""
    by_streams, by_length = serving()["streams"]["rows"], serving()["prompts"]["rows"]

    def curves(rows: list[Row], x: str, y: str) -> dict[str, Points]:
        return {name: sorted((row[x], row[y]) for row in rows if row["model"] == key) for key, name in MODELS.items()}

    streams = "streams (512 tokens in, 128 out)"
    panels = [
        _panel(palette, "tokens per second", streams, curves(by_streams, "concurrency", "output_throughput")),
        _panel(palette, "P99 inter-token latency, ms", streams, curves(by_streams, "concurrency", "p99_itl_ms")),
        _panel(palette, "time to first token, ms", streams, curves(by_streams, "concurrency", "median_ttft_ms")),
        _panel(
            palette,
            "time to first token, ms",
            "prompt tokens (1 stream)",
            curves(by_length, "input_len", "median_ttft_ms"),
        ),
    ]
    width, height = PANEL
    parts = []
    for index, (name, colour) in enumerate(zip(MODELS.values(), _colours(palette), strict=True)):
        x = 24 + 120 * index
        parts += [rect(x, 16, 12, 12, colour), text(x + 18, 26, name, kind="name")]
    for index, drawn in enumerate(panels):
        parts += [f'<g transform="translate({index % 2 * width},{30 + index // 2 * height})">', *drawn, "</g>"]
    return picture(palette, 2 * width, 2 * height + 40, "Throughput and latency by streams and prompt length", parts)


def _colours(palette: Palette) -> tuple[str, str]:
    return palette.accent, "#d9772f" if palette.name == "light" else "#f0a060"


def _panel(palette: Palette, title: str, x_label: str, curves: dict[str, Points]) -> list[str]:
    """Both axes logarithmic; each point carries its value."""
    width, height = PANEL
    xs = sorted({x for points in curves.values() for x, _ in points})
    ys = [y for points in curves.values() for _, y in points if y > 0]
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    bottom, top = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)) + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low)
        up = (math.log10(y) - bottom) / (top - bottom)
        return LEFT + 24 + across * (width - LEFT - RIGHT - 48), height - BOTTOM - up * (height - TOP - BOTTOM)

    parts = [text(24, 30, title, kind="name")]
    for power in range(bottom, top + 1):
        _, y = place(xs[0], 10.0**power)
        parts.append(line([(LEFT, y), (width - RIGHT, y)], palette.edge))
        parts.append(text(LEFT - 8, y + 4, f"{10.0**power:,g}", anchor="end", size=11))
    for x in xs:
        parts.append(text(place(x, 10.0**bottom)[0], height - BOTTOM + 17, f"{x:,g}", anchor="middle", size=11))
    parts.append(text((LEFT + width - RIGHT) / 2, height - 10, x_label, anchor="middle", size=11))
    for points, colour in zip(curves.values(), _colours(palette), strict=True):
        parts.append(line([place(x, y) for x, y in points], colour, width=2))
        for x, y in points:
            across, down = place(x, y)
            parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>')
            # The highest curve's values stand above it, the others' below theirs where there is room.
            is_highest = y >= max(value for others in curves.values() for place_x, value in others if place_x == x)
            at = down - 8 if is_highest or down > height - BOTTOM - 16 else down + 17
            label = _short(y) if y >= 20 else f"{y:.1f}"
            parts.append(text(across, at, label, kind="num", anchor="middle", fill=colour, size=11))
    return parts
