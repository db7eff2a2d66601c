"""The plots of one run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tessera.loadtest.client.records import Records
from tessera.loadtest.report.svg import Plot
from tessera.loadtest.run.summary import latencies_of

Array = npt.NDArray[np.float64]
HISTOGRAM_BINS = 48
CLIPPED_PERCENTILE = 99.5  # a histogram ends here: a few outliers would press the rest into one bar
TIME_BINS = 120
MAX_DOTS = 2000


def distributions(records: Records, percentiles: Sequence[float]) -> dict[str, str]:
    """A histogram for each latency that was measured, by metric."""
    return {
        metric: _histogram(metric.upper(), seconds * 1e3, percentiles)
        for metric, seconds in latencies_of(records).items()
        if len(seconds)
    }


def _histogram(name: str, milliseconds: Array, percentiles: Sequence[float]) -> str:
    low, high = float(milliseconds.min()), float(np.percentile(milliseconds, CLIPPED_PERCENTILE))
    high = max(high, low + max(abs(low) * 0.02, 1e-3))
    bins = int(np.clip(2 * np.sqrt(len(milliseconds)), 12, HISTOGRAM_BINS))
    counts, edges = np.histogram(milliseconds, bins, (low, high))
    slowest = float(milliseconds.max())
    beyond = f"; slowest {slowest:.1f} ms" if slowest > high else ""
    plot = Plot(f"{name}, ms{beyond}", "count", (low, high), float(counts.max()), f"distribution of {name}", 1.45)
    for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            plot.bar(float(left), float(right), float(count), f"{left:.2f} to {right:.2f} ms: {count}")
    for row, percentile in enumerate(sorted({50.0, *percentiles})):
        value = float(np.percentile(milliseconds, percentile))
        label = "median" if percentile == 50 else f"P{percentile:g}"
        plot.vertical(min(value, high), f"{label} {value:.2f}", row)
    return plot.render()


def throughput_over_time(records: Records, start: float) -> str:
    """Tokens received per second; an event counts for as many tokens as its completion has per event."""
    per_event = records.output_tokens / np.maximum(records.num_times, 1)
    weights = np.repeat(np.where(records.ok, per_event, 1.0), records.num_times)
    times = records.token_times - start
    if not len(times):  # not streamed: a completion's tokens come at its end
        times, weights = (records.end - start)[records.ok], records.output_tokens[records.ok].astype(np.float64)
    end = float((records.end - start).max(initial=1e-3))
    tokens, edges = np.histogram(times, _bins(len(times)), (0, end), weights=weights)
    width = end / len(tokens)
    points = [(float(x), float(y)) for x, y in zip((edges[:-1] + edges[1:]) / 2, tokens / width, strict=True)]
    highest = max((y for _, y in points), default=1.0)
    plot = Plot("seconds", "output tokens / s", (0, end), highest, "output tokens per second over time")
    plot.line(points, filled=True)
    return plot.render()


def concurrency_over_time(records: Records, start: float) -> str:
    """Requests under way."""
    edges = np.concatenate([records.start, records.end]) - start
    steps = np.repeat([1, -1], len(records.start))
    order = np.argsort(edges, kind="stable")
    times, running = edges[order], np.cumsum(steps[order])
    end = float(times.max(initial=1e-3))
    grid = np.linspace(0, end, 2 * TIME_BINS)
    index = np.searchsorted(times, grid, side="right") - 1
    values = np.where(index >= 0, running[np.maximum(index, 0)], 0) if len(times) else np.zeros_like(grid)
    plot = Plot(
        "seconds", "requests under way", (0, end), float(running.max(initial=1)), "requests under way over time"
    )
    plot.line([(float(x), float(y)) for x, y in zip(grid, values, strict=True)], "b", filled=True)
    return plot.render()


def ttft_over_time(records: Records, start: float) -> str:
    """A dot for each request: when it was sent, and how long its first token took."""
    seen = np.flatnonzero(records.ok & ~np.isnan(records.first))
    seen = seen[:: max(1, len(seen) // MAX_DOTS)]
    sent, ttft = (records.start - start)[seen], (records.first - records.start)[seen] * 1e3
    end = float((records.end - start).max(initial=1e-3))
    plot = Plot("seconds", "TTFT, ms", (0, end), float(ttft.max(initial=1e-3)), "time to first token over time")
    plot.dots(
        [(float(x), float(y), f"sent at {x:.2f} s: {y:.1f} ms") for x, y in zip(sent, ttft, strict=True)], radius=2.2
    )
    return plot.render()


def itl_over_time(records: Records, start: float) -> str:
    """Median and P99 of the gaps between tokens, by when they ended: a server that stalls shows here."""
    gaps, ends = records.gaps() * 1e3, records.gap_ends() - start
    end = float((records.end - start).max(initial=1e-3))
    edges = np.linspace(0, end, _bins(len(gaps)) // 2 + 1)
    place = np.clip(np.searchsorted(edges, ends, side="right") - 1, 0, len(edges) - 2)
    lines: dict[int, list[tuple[float, float]]] = {50: [], 99: []}
    for index in np.unique(place).tolist():
        inside = gaps[place == index]
        for percentile, points in lines.items():
            points.append((float(edges[index] + edges[index + 1]) / 2, float(np.percentile(inside, percentile))))
    highest = max(y for _, y in lines[99])
    plot = Plot("seconds", "ITL, ms (blue: median, orange: P99)", (0, end), highest, "inter-token latency over time")
    plot.line(lines[99], "b")
    plot.line(lines[50])
    return plot.render()


def _bins(num_samples: int) -> int:
    return max(8, min(TIME_BINS, num_samples // 16))


def sections(records: Records, start: float, percentiles: Sequence[float]) -> list[tuple[str, list[str]]]:
    """Headings, each with its plots."""
    parts: list[tuple[str, list[str]]] = []
    histograms = distributions(records, percentiles)
    if histograms:
        parts.append(("Latencies", list(histograms.values())))
    over_time = [throughput_over_time(records, start), concurrency_over_time(records, start)]
    if "ttft" in histograms:
        over_time.append(ttft_over_time(records, start))
    if "itl" in histograms:
        over_time.append(itl_over_time(records, start))
    parts.append(("Over time", over_time))
    return parts
