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
    rows = [
        ("Successful requests", f"{summary['completed']}"),
        ("Failed requests", f"{summary['failed']}"),
        ("Benchmark duration (s)", f"{summary['duration']:.2f}"),
        ("Total input tokens", f"{summary['total_input_tokens']}"),
        ("Total generated tokens", f"{summary['total_output_tokens']}"),
        ("Request throughput (req/s)", f"{summary['request_throughput']:.2f}"),
        ("Output token throughput (tok/s)", f"{summary['output_throughput']:.1f}"),
        ("Total token throughput (tok/s)", f"{summary['total_token_throughput']:.1f}"),
        ("Peak concurrent requests", f"{summary['max_concurrent_requests']}"),
    ]
    if "request_goodput" in summary:
        share = f"{summary['request_goodput']:.2f} ({summary['goodput_share']:.1%})"
        rows.insert(6, ("Request goodput (req/s)", share))
    busiest = f"{summary['client_cpu_share']:.0%} of a core"
    return [*rows, (f"Busiest of {summary['client_processes']} client processes", busiest)]


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


def sweep_table(levels: Sequence[Level]) -> Table:
    """The rates that were tried, ascending."""
    table = Table(title="Request rates", box=box.SIMPLE)
    for column in ("req/s asked", "done", "tok/s", "TTFT median", "P99", "TPOT median"):
        table.add_column(column, justify="right")
    table.add_column("within limits", justify="right")
    for level in sorted(levels, key=lambda level: level.request_rate):
        summary = level.summary
        table.add_row(
            "all at once" if level.request_rate == float("inf") else f"{level.request_rate:.2f}",
            f"{summary['request_throughput']:.2f}",
            f"{summary['output_throughput']:.0f}",
            f"{summary['median_ttft_ms']:.1f}",
            f"{summary['p99_ttft_ms']:.1f}",
            f"{summary['median_tpot_ms']:.2f}",
            f"{summary['goodput_share']:.1%} {'yes' if level.met else 'no'}",
        )
    return table
