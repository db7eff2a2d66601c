"""Figures of a run, under the names that vLLM's benchmark gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tessera.loadtest.client.records import Records
from tessera.loadtest.metrics import PERCENTILES

if TYPE_CHECKING:
    from tessera.loadtest.run.load_run import Outcome

BUSY_CLIENT = 0.8  # share of one core above which a client process may delay what it measures
TRIMMED = 0.1  # share of completions at each end of a run that do not count for its steady rate
SHORTFALL = 0.05  # share of the arrivals' rate by which completions fall short of it in a server that is saturated
NOISE = 1.5  # of a rate, by the square root of the number of requests


def summarize(
    outcome: Outcome, goodput: Mapping[str, float] | None = None, percentiles: Sequence[float] = PERCENTILES
) -> dict[str, Any]:
    """Totals, throughputs per second, and mean, median, std and percentiles of each latency in milliseconds.

    `loadtest.metrics` defines the latencies. Tokens are those that the server's usage counts; failed requests count as
    failed and in nothing else. `duration` ends with the last completion. Completions that were not streamed have an
    E2EL alone; a latency without samples is 0.

    `total_cached_tokens` are the prompt tokens that the server took from its prefix cache, None where it does not say.
    `steady_request_throughput` leaves out the beginning and the end of the run: of requests with times at which they
    were due, completions per second between the first and last tenth of them; otherwise the rate at which those under
    way advance, from the first completion until no further one is sent. `steady_arrival_rate` is that of the times at
    which they were due, 0 where all were due at once. `saturated` says that completions fall short of arrivals by more
    than noise.

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
    due = np.asarray(outcome.due) if len(outcome.due) == len(good) else np.zeros(len(good))
    arrivals, completions = _steady_rate(due), _steady_rate(np.sort(records.end[good]))
    if not arrivals:
        completions = _rate_under_way(records.start[good], records.end[good]) or completions
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": completed,
        "failed": len(good) - completed,
        "errors": records.errors,
        "error_examples": records.examples,
        "interrupted": outcome.interrupted,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "total_cached_tokens": _cached_tokens(records),
        "request_throughput": completed * rate,
        "output_throughput": output_tokens * rate,
        "total_token_throughput": (input_tokens + output_tokens) * rate,
        "max_output_tokens_per_s": _peak_tokens(records),
        "steady_request_throughput": completions,
        "steady_arrival_rate": arrivals,
        "saturated": _falls_behind(completions, arrivals, len(good)),
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


def details(outcome: Outcome) -> dict[str, Any]:
    """Lists with an item for each request, in the order of sending; times in seconds."""
    records = outcome.records
    bounds = np.concatenate(([0], np.cumsum(records.num_times)))
    gaps = [np.diff(records.token_times[bounds[i] : bounds[i + 1]]).tolist() for i in range(len(records.start))]
    return {
        "input_lens": records.input_tokens.tolist(),
        "output_lens": records.output_tokens.tolist(),
        "cached_lens": records.cached_tokens.tolist(),
        "start_times": (records.start - outcome.start).tolist(),
        "ttfts": [None if np.isnan(ttft) else ttft for ttft in (records.first - records.start).tolist()],
        "itls": gaps,
        "latencies": (records.end - records.start).tolist(),
        "succeeded": records.ok.tolist(),
    }


def _cached_tokens(records: Records) -> int | None:
    told = records.ok & (records.cached_tokens >= 0)
    return int(records.cached_tokens[told].sum()) if told.any() else None


def _steady_rate(times: npt.NDArray[np.float64]) -> float:
    """Events per second between the first and the last tenth of them; `times` ascend. 0 for too few."""
    low, high = int(len(times) * TRIMMED), int(len(times) * (1 - TRIMMED)) - 1
    seconds = float(times[high] - times[low]) if high > low else 0.0
    return (high - low) / seconds if seconds > 0 else 0.0


def _rate_under_way(start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]) -> float:
    """Requests per second while all places are taken, where each counts evenly from its start to its end.

    Completions alone would not do: requests that begin together end together, in waves, and a count between two times
    is off by up to a wave. 0 where no request started after the first completion.
    """
    first, last = (float(end.min()), float(start.max())) if len(end) else (0.0, 0.0)
    if last <= first:
        return 0.0
    shares = (np.minimum(end, last) - np.maximum(start, first)) / np.maximum(end - start, 1e-9)
    return float(np.clip(shares, 0, 1).sum()) / (last - first)


def _falls_behind(completions: float, arrivals: float, num_requests: int) -> bool:
    tolerated = max(SHORTFALL, NOISE / math.sqrt(max(num_requests, 1)))
    return completions < (1 - tolerated) * arrivals


def _peak_tokens(records: Records) -> float:
    """Most tokens received within one second of the clock; an event counts as one."""
    times = records.token_times
    if not len(times):
        return 0.0
    return float(np.bincount((times - times.min()).astype(np.int64)).max())


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
