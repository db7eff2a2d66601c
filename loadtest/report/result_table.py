"""Tables of a run's figures for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from tessera.loadtest.run.sweep import Level

MIN_WIDTH = 60  # characters


def totals(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the figures that are one number."""
    asked, generated = summary.get("request_rate"), summary["total_output_tokens"]
    rows = [
        ("Successful requests", f"{summary['completed']}"),
        ("Failed requests", f"{summary['failed']}"),
        ("Benchmark duration (s)", f"{summary['duration']:.2f}"),
        ("Total input tokens", f"{summary['total_input_tokens']}"),
        ("Prompt tokens from the prefix cache", cached_text(summary)),
        *([("Total generated tokens", f"{summary['total_output_tokens']}")] if generated else []),
        ("Request throughput (req/s)", f"{summary['request_throughput']:.2f}"),
        *([("Output token throughput (tok/s)", f"{summary['output_throughput']:.1f}")] if generated else []),
        ("Total token throughput (tok/s)", f"{summary['total_token_throughput']:.1f}"),
        ("Peak concurrent requests", f"{summary['max_concurrent_requests']}"),
    ]
    if "request_goodput" in summary:
        share = f"{summary['request_goodput']:.2f} ({summary['goodput_share']:.1%})"
        rows.insert(-2, ("Request goodput (req/s)", share))
    if isinstance(asked, int | float):
        rows.insert(2, ("Request rate asked for (req/s)", f"{asked:.2f}"))
    busiest = f"{summary['client_cpu_share']:.0%} of a core"
    return [*rows, (f"Busiest of {summary['client_processes']} client processes", busiest)]


def cached_text(summary: dict[str, Any]) -> str:
    cached = summary["total_cached_tokens"]
    return "not told" if cached is None else f"{cached} ({cached / max(summary['total_input_tokens'], 1):.1%})"


def latency_rows(
    summary: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> tuple[list[str], list[list[str]]]:
    """Column names, and a row for each metric that was measured: its name, then milliseconds."""
    statistics = ["mean", "median", *(f"p{percentile:g}" for percentile in percentiles)]
    rows = [
        [f"{metric.upper()} (ms)", *(f"{summary[f'{statistic}_{metric}_ms']:.2f}" for statistic in statistics)]
        for metric in metrics
        if summary[f"mean_{metric}_ms"]
    ]
    return [statistic.capitalize() for statistic in statistics], rows


def summary_table(summary: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> Group:
    """The single figures, and below them the latencies."""
    figures = Table(title="Serving benchmark result", box=box.SIMPLE, show_header=False, min_width=MIN_WIDTH)
    figures.add_column()
    figures.add_column(justify="right")
    for name, value in totals(summary):
        figures.add_row(name, value)
    columns, rows = latency_rows(summary, metrics, percentiles)
    latencies = Table(box=box.SIMPLE, min_width=MIN_WIDTH)
    for index, column in enumerate(["", *columns]):
        latencies.add_column(column, justify="right" if index else "left")
    for row in rows:
        latencies.add_row(*row)
    return Group(figures, latencies) if rows else Group(figures)


def sweep_columns(levels: Sequence[Level]) -> list[str]:
    """Headings of `sweep_rows`."""
    load = "under way" if levels[0].concurrency else "req/s asked"
    limits = ["in limits"] if "goodput_share" in levels[0].summary else []
    return [load, "req/s", "tok/s", "TTFT", "P99", "TPOT", "E2EL", "cached", *limits]


def sweep_rows(levels: Sequence[Level]) -> list[list[str]]:
    """The loads that were tried, ascending; latencies in ms, medians where not P99."""
    rows = []
    for level in sorted(levels, key=lambda level: (level.concurrency or 0, level.request_rate)):
        summary = level.summary
        cached, total = summary["total_cached_tokens"], summary["total_input_tokens"]
        rate = "all at once" if level.request_rate == float("inf") else f"{level.request_rate:.2f}"
        row = [
            str(level.concurrency) if level.concurrency else rate,
            f"{level.throughput:.2f}{'*' if summary['saturated'] else ''}",
            f"{summary['output_throughput']:.0f}",
            f"{summary['median_ttft_ms']:.1f}",
            f"{summary['p99_ttft_ms']:.1f}",
            f"{summary['median_tpot_ms']:.2f}",
            f"{summary['median_e2el_ms']:.0f}",
            "?" if cached is None else f"{cached / max(total, 1):.0%}",
        ]
        if "goodput_share" in summary:
            row.append(f"{summary['goodput_share']:.1%} {'yes' if level.met else 'no'}")
        rows.append(row)
    return rows


def sweep_table(levels: Sequence[Level]) -> Table:
    """`sweep_rows` for the terminal."""
    star = any(level.summary["saturated"] for level in levels)
    caption = "* the server does not keep up with the rate" if star and not levels[0].concurrency else None
    table = Table(title="Loads tried", box=box.SIMPLE, caption=caption, caption_justify="left", padding=(0, 1, 0, 0))
    for column in sweep_columns(levels):
        table.add_column(column, justify="right", no_wrap=True)
    for row in sweep_rows(levels):
        table.add_row(*row)
    return table
