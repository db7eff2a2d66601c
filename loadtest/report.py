"""The table that load tests of this field print."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from loadtest.summary import METRICS

STATISTICS = ("mean", "median", "p90", "p99")


def render(summary: dict[str, Any]) -> Table:
    """The summary as a table."""
    table = Table(title="Serving benchmark result", show_header=True)
    table.add_column("figure")
    for column in STATISTICS:
        table.add_column(column, justify="right")
    for name, value in (
        ("Successful requests", f"{summary['completed']}"),
        ("Failed requests", f"{summary['failed']}"),
        ("Benchmark duration (s)", f"{summary['duration']:.2f}"),
        ("Total input tokens", f"{summary['total_input_tokens']}"),
        ("Total generated tokens", f"{summary['total_output_tokens']}"),
        ("Request throughput (req/s)", f"{summary['request_throughput']:.2f}"),
        ("Output token throughput (tok/s)", f"{summary['output_throughput']:.1f}"),
        ("Total token throughput (tok/s)", f"{summary['total_token_throughput']:.1f}"),
        ("Peak concurrent requests", f"{summary['max_concurrent_requests']}"),
        ("Client CPU, busiest process", f"{summary['client_cpu_share']:.0%}"),
    ):
        table.add_row(name, value)
    table.add_section()
    for metric in METRICS:
        cells = [f"{summary[f'{statistic}_{metric}_ms']:.2f}" for statistic in STATISTICS]
        table.add_row(f"{metric.upper()} (ms)", *cells)
    return table
