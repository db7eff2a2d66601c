"""Figures of a run, under the names that vLLM's benchmark gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tessera.loadtest.client.records import Records
from tessera.loadtest.metrics import PERCENTILES

if TYPE_CHECKING:
    from tessera.loadtest.run.load_run import Outcome

BUSY_CLIENT = 0.8  # share of one core above which a client process may delay what it measures


def summarize(
    outcome: Outcome, goodput: Mapping[str, float] | None = None, percentiles: Sequence[float] = PERCENTILES
) -> dict[str, Any]:
    """Totals, throughputs per second, and mean, median, std and percentiles of each latency in milliseconds.

    `loadtest.metrics` defines the latencies. Tokens are those that the server's usage counts; failed requests count as
    failed and in nothing else. `duration` ends with the last completion. Completions that were not streamed have an
    E2EL alone; a latency without samples is 0.

    `client_cpu_share` is that of the busiest client process, as a share of one core.

    Args:
        goodput: most milliseconds by metric (ttft, tpot, e2el). The summary then has `request_goodput`, requests per
            second that kept to all of them, and `goodput_share`, the share of all requests that did.
        percentiles: beside P90 and P99.
    """
    records = outcome.records
    good = records.ok
    duration = float(records.end.max() - outcome.start) if len(records.end) else 0.0
    rate = 1 / duration if duration > 0 else 0.0
    completed = int(good.sum())
    input_tokens = int(records.input_tokens[good].sum())
    output_tokens = int(records.output_tokens[good].sum())
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": completed,
        "failed": len(good) - completed,
        "errors": records.errors,
        "error_examples": records.examples,
        "interrupted": outcome.interrupted,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": completed * rate,
        "output_throughput": output_tokens * rate,
        "total_token_throughput": (input_tokens + output_tokens) * rate,
        "max_concurrent_requests": peak_concurrency(records.start, records.end),
        "client_processes": len(outcome.cpu_shares),
        "client_cpu_share": max(outcome.cpu_shares, default=0.0),
    }
    if goodput:
        met = int(_meets(records, goodput).sum())
        summary["request_goodput"] = met * rate
        summary["goodput_share"] = met / max(len(good), 1)
    for metric, seconds in latencies_of(records).items():
        milliseconds = seconds * 1e3 if len(seconds) else np.zeros(1)
        summary[f"mean_{metric}_ms"] = float(milliseconds.mean())
        summary[f"median_{metric}_ms"] = float(np.median(milliseconds))
        summary[f"std_{metric}_ms"] = float(milliseconds.std())
        for percentile in sorted({*PERCENTILES, *percentiles}):
            summary[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(milliseconds, percentile))
    return summary


def _meets(records: Records, goodput: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """[requests] whether each succeeded within the limits; a latency that a request lacks breaks none."""
    seconds = {
        "ttft": records.first - records.start,
        "tpot": (records.end - records.first) / np.maximum(records.output_tokens - 1, 1),
        "e2el": records.end - records.start,
    }
    meets = records.ok.copy()
    for metric, limit in goodput.items():
        meets &= ~(seconds[metric] * 1e3 > limit)
    return meets


def latencies_of(records: Records) -> dict[str, npt.NDArray[np.float64]]:
    """Seconds, by metric, of the successful requests."""
    streamed = records.ok & ~np.isnan(records.first)
    several = streamed & (records.output_tokens > 1)
    return {
        "ttft": (records.first - records.start)[streamed],
        "tpot": ((records.end - records.first)[several]) / (records.output_tokens[several] - 1),
        "itl": records.gaps(),
        "e2el": (records.end - records.start)[records.ok],
    }


def peak_concurrency(start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]) -> int:
    """Most requests that were under way at one time."""
    times = np.concatenate([end, start])  # an end counts before a start at the same time
    steps = np.repeat([-1, 1], len(start))
    running = np.cumsum(steps[np.argsort(times, kind="stable")])
    return int(running.max(initial=0))
