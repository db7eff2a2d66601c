"""How near the load test's figures come to the truth, which a server with known delays keeps."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import numpy as np

from tessera.loadtest.run.load_run import run_load
from tessera.loadtest.workload.arrival import Arrival
from tessera.loadtest.workload.random_prompts import RandomWorkload
from tests.support.fakes.load_stub import Manner, StubServer

STREAMS = (8, 64, 256)
REQUESTS_PER_STREAM = 3
INPUT_LEN, OUTPUT_LEN = 50, 60
MANNER = Manner(ttft=0.12, tpot=0.012)


def measure() -> list[dict[str, Any]]:
    """One row for each number of streams and each figure: the server's, the client's, and how far they lie apart."""
    return [row for streams in STREAMS for row in _compare(streams)]


def _compare(streams: int) -> list[dict[str, Any]]:
    number = streams * REQUESTS_PER_STREAM
    with StubServer(lambda _index, _body: MANNER) as server:
        workload = RandomWorkload(number, INPUT_LEN, OUTPUT_LEN, 500)
        summary = run_load(server.url, "stub", workload, Arrival(max_concurrency=streams))
    if summary["completed"] != number:
        raise RuntimeError(f"{summary['failed']} of {number} requests failed: {summary['errors']}")
    return [
        {
            "streams": streams,
            "figure": name,
            "server": true,
            "client": summary[name],
            "difference %": (summary[name] / true - 1) * 100,
        }
        for name, true in _truth(server).items()
    ]


def _truth(server: StubServer) -> dict[str, float]:
    """From when the server had each request and sent each token."""
    exchanges = server.exchanges
    ttft = [(exchange.sent[0] - exchange.received) * 1e3 for exchange in exchanges]
    tpot = [(exchange.sent[-1] - exchange.sent[0]) / (OUTPUT_LEN - 1) * 1e3 for exchange in exchanges]
    e2el = [(exchange.sent[-1] - exchange.received) * 1e3 for exchange in exchanges]
    gaps = np.concatenate([np.diff(exchange.sent) for exchange in exchanges]) * 1e3
    duration = max(exchange.sent[-1] for exchange in exchanges) - min(exchange.received for exchange in exchanges)
    return {
        "mean_ttft_ms": fmean(ttft),
        "median_ttft_ms": median(ttft),
        "mean_tpot_ms": fmean(tpot),
        "p99_itl_ms": float(np.percentile(gaps, 99)),
        "median_e2el_ms": median(e2el),
        "output_throughput": len(exchanges) * OUTPUT_LEN / duration,
    }
