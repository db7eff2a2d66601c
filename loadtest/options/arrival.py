"""Options about when requests are sent."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from tessera.options.declaration import Option
from tessera.options.errors import OptionError

ARRIVAL = "arrival"
DEFAULT_TARGET = 0.95
MAX_CONCURRENCY = 2**20
MAX_COUNT = 2**31
MIN_RATE = 1e-6  # requests per second


def _concurrency(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= MAX_CONCURRENCY:
        raise OptionError(f"must be whole numbers from 1 to {MAX_CONCURRENCY} with commas, not {text!r}")
    return int(text)


class ArrivalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When requests are sent."""

    max_concurrency: Annotated[
        int | None,
        Option("most requests under way", group=ARRIVAL, metavar="N", low=1, high=MAX_CONCURRENCY, default="no bound"),
    ] = None
    request_rate: Annotated[
        float,
        Option(
            "requests per second; inf: each as soon as --max-concurrency lets it",
            group=ARRIVAL,
            metavar="RPS",
            low=MIN_RATE,
        ),
    ] = math.inf
    burstiness: Annotated[
        float,
        Option(
            "1: Poisson; below: in bursts; above: more even; inf: constant rate",
            group=ARRIVAL,
            metavar="SHAPE",
            low=MIN_RATE,
        ),
    ] = 1.0
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None,
        Option("let the rate change from start to end", group=ARRIVAL),
    ] = None
    ramp_up_start_rps: Annotated[
        float | None, Option("first rate of a ramp", group=ARRIVAL, metavar="RPS", low=MIN_RATE)
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, Option("last rate of a ramp", group=ARRIVAL, metavar="RPS", low=MIN_RATE)
    ] = None
    max_seconds: Annotated[
        float | None,
        Option(
            "send no request after it; those under way are completed. Of each level of a sweep",
            group=ARRIVAL,
            metavar="SECONDS",
            low=0.01,
            high=1e7,
            default="no bound",
        ),
    ] = None
    sweep: Annotated[
        float | None,
        Option(
            "find the highest request rate at which this share of the requests meets --goodput",
            group=ARRIVAL,
            metavar="SHARE",
            low=0.001,
            high=1,
            bare=DEFAULT_TARGET,
            default=f"no sweep; {DEFAULT_TARGET} with --sweep alone",
        ),
    ] = None
    sweep_concurrency: Annotated[
        tuple[int, ...] | None,
        Option(
            "try these numbers of requests under way, by comma; without them 1, 2, 4, ... until the server is "
            "saturated",
            group=ARRIVAL,
            metavar="N,N",
            parse=_concurrency,
            repetition="commas",
            bare=(),
            default="no sweep",
        ),
    ] = None
    num_warmups: Annotated[
        int,
        Option("requests that are sent first and not counted", group=ARRIVAL, metavar="N", low=0, high=MAX_COUNT),
    ] = 0
    processes: Annotated[
        int | None,
        Option(
            "of the client",
            group=ARRIVAL,
            metavar="N",
            low=1,
            high=1024,
            default="as many as streams and cores suggest",
        ),
    ] = None
