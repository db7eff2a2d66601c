"""The plots of a sweep: what changes with the load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.loadtest.report.svg import Plot
from tessera.loadtest.run.sweep import Level, saturation


def load_plots(levels: Sequence[Level], summary: Mapping[str, Any]) -> list[str]:
    """Throughput, latencies, and the share of requests within the limits, by the load."""
    shown = sorted((level for level in levels if math.isfinite(_load(level))), key=_load)
    if not shown:
        return []
    plots = [throughput_by_load(shown)]
    plots += [latency_by_load(shown, metric, summary["goodput"]) for metric in ("ttft", "tpot", "e2el")]
    if "goodput_share" in shown[0].summary:
        plots.append(share_by_load(shown, summary.get("sweep_target")))
    return plots


def _load(level: Level) -> float:
    return float(level.concurrency) if level.concurrency else level.request_rate


def _x_axis(levels: Sequence[Level]) -> tuple[str, tuple[float, float]]:
    label = "requests under way" if levels[0].concurrency else "requests / s asked for"
    return label, (0.0, max(_load(level) for level in levels))


def throughput_by_load(levels: Sequence[Level]) -> str:
    """Requests per second that were reached."""
    label, x_range = _x_axis(levels)
    points = [(_load(level), level.throughput) for level in levels]
    highest = max(y for _, y in points)
    y_label = "requests / s reached" + ("" if levels[0].concurrency else " (orange: as many as asked for)")
    plot = Plot(label, y_label, x_range, highest or 1.0, "throughput by load")
    place = saturation(levels) if levels[0].concurrency else None
    if place is not None:
        plot.vertical(_load(place), f"saturated at {place.concurrency}")
    if not levels[0].concurrency:
        plot.line([(0.0, 0.0), (min(x_range[1], highest), min(x_range[1], highest))], "b")
    plot.line(points)
    plot.dots([(x, y, f"{x:.4g}: {y:.2f} requests/s") for x, y in points], radius=4)
    return plot.render()


def latency_by_load(levels: Sequence[Level], metric: str, goodput: Mapping[str, float]) -> str:
    """Median and P99 of `metric`."""
    label, x_range = _x_axis(levels)
    lines: dict[str, list[tuple[float, float]]] = {
        statistic: [(_load(level), level.summary[f"{statistic}_{metric}_ms"]) for level in levels]
        for statistic in ("median", "p99")
    }
    highest = max(y for points in lines.values() for _, y in points) or 1.0
    name = metric.upper()
    plot = Plot(label, f"{name}, ms (blue: median, orange: P99)", x_range, highest, f"{name} by load")
    if metric in goodput:
        plot.horizontal(goodput[metric], f"limit {goodput[metric]:g} ms")
    for statistic, style in (("median", "a"), ("p99", "b")):
        plot.line(lines[statistic], style)
        plot.dots([(x, y, f"{x:.4g}: {statistic} {y:.1f} ms") for x, y in lines[statistic]], style, 4)
    return plot.render()


def share_by_load(levels: Sequence[Level], target: float | None) -> str:
    """Share of requests within the limits."""
    label, x_range = _x_axis(levels)
    points = [(_load(level), level.summary["goodput_share"] * 100) for level in levels]
    plot = Plot(label, "% within the limits", x_range, 100.0, "share of requests within the limits by load")
    if target is not None:
        plot.horizontal(target * 100, f"target {target:.1%}")
    plot.line(points)
    plot.dots([(x, y, f"{x:.4g}: {y:.1f} %") for x, y in points], radius=4)
    return plot.render()
