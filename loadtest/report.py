"""The field's figures of a load test: a dictionary with the usual keys, and a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from rich.table import Table

from loadtest.client import RequestRecord

METRICS = ("ttft", "tpot", "itl", "e2el")


def summarize(records: list[RequestRecord], duration: float) -> dict[str, Any]:
    """Totals, throughputs (per second) and mean, median, std, p90, p99 of each latency in milliseconds."""
    good = [record for record in records if record.error is None]
    samples = {
        "ttft": [record.ttft for record in good],
        "tpot": [record.tpot for record in good if record.output_tokens > 1],
        "itl": [itl for record in good for itl in record.itls],
        "e2el": [record.e2el for record in good],
    }
    input_tokens = sum(record.input_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(records) - len(good),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
    }
    for metric, values in samples.items():
        milliseconds = np.asarray(values) * 1e3 if values else np.zeros(1)
        summary[f"mean_{metric}_ms"] = float(milliseconds.mean())
        summary[f"median_{metric}_ms"] = float(np.median(milliseconds))
        summary[f"std_{metric}_ms"] = float(milliseconds.std())
        summary[f"p90_{metric}_ms"] = float(np.percentile(milliseconds, 90))
        summary[f"p99_{metric}_ms"] = float(np.percentile(milliseconds, 99))
    return summary


def render(summary: dict[str, Any]) -> Table:
    """The summary as the table that load tests of this field print."""
    table = Table(title="Serving benchmark result", show_header=True)
    table.add_column("figure")
    for column in ("mean", "median", "p90", "p99"):
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
    ):
        table.add_row(name, value)
    table.add_section()
    for metric in METRICS:
        cells = [f"{summary[f'{statistic}_{metric}_ms']:.2f}" for statistic in ("mean", "median", "p90", "p99")]
        table.add_row(f"{metric.upper()} (ms)", *cells)
    return table
