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

# Settings that make two runs the same load; runs of two models, servers or seeds may be compared.
LOAD = (
    *("endpoint", "stream", "sampling", "ignore_eos", "dataset_name", "dataset_path", "num_prompts", "input_len"),
    *("output_len", "range_ratio", "prefix_len", "num_prefixes", "num_turns", "batch_size", "self_timed"),
    *("trace_speed", "request_rate", "burstiness", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"),
    *("max_concurrency", "max_seconds", "fresh_prompts", "sweep_kind"),
)
SEARCHED = {"rate": ("request_rate",), "concurrency": ("max_concurrency",)}  # what a sweep finds is no setting
MAX_CACHE_DIFFERENCE = 0.05


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


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What the two loads differ in, a phrase each. Settings that one of the files lacks are not compared."""
    found = []
    searched = SEARCHED.get(new.get("sweep_kind", ""), ()) if new.get("sweep_kind") == old.get("sweep_kind") else ()
    for key in (key for key in LOAD if key not in searched):
        before, after = old.get(key), new.get(key)
        if key in old and key in new and before != after:
            found.append(f"{key} was {_shown(before)} and is {_shown(after)}")
    shares = [_cached_share(summary) for summary in (old, new)]
    if all(share is not None for share in shares):
        before, after = shares
        if abs(before - after) > MAX_CACHE_DIFFERENCE:
            found.append(f"the prefix cache gave {before:.0%} of the prompt tokens and gives {after:.0%}")
    return found


def _cached_share(summary: dict[str, Any]) -> Any:
    cached, total = summary.get("total_cached_tokens"), summary.get("total_input_tokens")
    return cached / total if cached is not None and total else None


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def comparison_table(old: dict[str, Any], new: dict[str, Any]) -> Table:
    """Without verdicts where the loads differ."""
    same_load = not differences(old, new)
    title = "Compared with the earlier run" if same_load else "Compared with the earlier run, of ANOTHER LOAD"
    table = Table(title=title, box=box.SIMPLE)
    table.add_column()
    for column in ("earlier", "now", "now / earlier"):
        table.add_column(column, justify="right")
    table.add_column()
    styles = {"better": "green", "worse": "red", "same": "dim"}
    for name, before, after, ratio, verdict in compare(old, new):
        shown, style = (verdict, styles[verdict]) if same_load else ("", "")
        table.add_row(name, f"{before:.2f}", f"{after:.2f}", f"{ratio:.3f}", shown, style=style)
    return table
