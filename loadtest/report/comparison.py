"""Two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from rich import box
from rich.table import Table

from tessera.loadtest.metrics import METRICS
from tessera.options.errors import OptionError

# Key, name, and whether more is better.
FIGURES = (
    ("request_throughput", "Request throughput (req/s)", True),
    ("request_goodput", "Request goodput (req/s)", True),
    ("output_throughput", "Output token throughput (tok/s)", True),
    ("total_token_throughput", "Total token throughput (tok/s)", True),
    *(
        (f"{statistic}_{metric}_ms", f"{statistic.capitalize()} {metric.upper()} (ms)", False)
        for metric in METRICS
        for statistic in ("mean", "median", "p99")
    ),
    ("failed", "Failed requests", False),
)


def read_summary(path: Path) -> dict[str, Any]:
    """Read the file that `--output` wrote, or that of another load test with the same keys.

    Raises:
        OptionError: it cannot be read, or is something else.
    """
    try:
        summary = orjson.loads(path.read_bytes())
    except OSError as error:
        raise OptionError(f"--compare: {error.strerror}: {path}") from error
    except orjson.JSONDecodeError as error:
        raise OptionError(f"--compare: {path} is not JSON: {error}") from error
    if not isinstance(summary, dict) or "request_throughput" not in summary:
        raise OptionError(f"--compare: {path} must be what --output wrote: it has no request_throughput")
    return summary


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, float, float, float, str]]:
    """Name, old, new, ratio new / old, and better, worse or same (within 1 %), of each figure that both have."""
    rows = []
    for key, name, more_is_better in FIGURES:
        before, after = old.get(key), new.get(key)
        if not isinstance(before, int | float) or not isinstance(after, int | float) or not before or not after:
            continue
        ratio = after / before
        verdict = "same" if abs(ratio - 1) <= 0.01 else "better" if (ratio > 1) == more_is_better else "worse"
        rows.append((name, float(before), float(after), ratio, verdict))
    return rows


def comparison_table(old: dict[str, Any], new: dict[str, Any]) -> Table:
    table = Table(title="Compared with the earlier run", box=box.SIMPLE)
    table.add_column()
    for column in ("earlier", "now", "now / earlier"):
        table.add_column(column, justify="right")
    table.add_column()
    styles = {"better": "green", "worse": "red", "same": "dim"}
    for name, before, after, ratio, verdict in compare(old, new):
        table.add_row(name, f"{before:.2f}", f"{after:.2f}", f"{ratio:.3f}", verdict, style=styles[verdict])
    return table
