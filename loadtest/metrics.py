"""The latencies that a load test measures.

TTFT: from sending a request to its first token. E2EL: to its last. TPOT: the time between these two over the tokens
after the first. ITL: between neighbouring events of a stream.
"""

from __future__ import annotations

from typing import Literal, get_args

MetricName = Literal["ttft", "tpot", "itl", "e2el"]
GoodputName = Literal["ttft", "tpot", "e2el"]  # those of which a request has one

METRICS: tuple[MetricName, ...] = get_args(MetricName)
GOODPUT_METRICS: tuple[GoodputName, ...] = get_args(GoodputName)
PERCENTILES = (90.0, 99.0)  # that are always reported
