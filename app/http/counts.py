"""Counts over all app processes: HTTP requests, use by model, connections, event loops' lag, spans."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tessera.app.limits.shared_memory import map_counts
from tessera.engine.contract.histogram import SECONDS_OF_DELAY

STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 499, 500, 503, 504, 507)
OTHER = "other"
USE_CELLS = ("requests", "prompt_tokens", "generation_tokens")
NUM_CONNECTION_CELLS = 2  # open, dropped
NUM_SPAN_CELLS = 2  # sent, dropped
NUM_LAG_CELLS = len(SECONDS_OF_DELAY) + 2  # buckets, the last without a bound, and the sum in nanoseconds


class HttpCounts:
    """A row of counts per app process, written by that process alone; a scrape adds the rows up.

    The rows lie in the memory behind `fd`, from `make_shared_memory`, which the processes of one server share; None
    keeps them in this process. The set of labels is fixed: paths that are not among `endpoints` count as `other`, and
    models that are not among `models` do not count.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        models: Sequence[str] = (),
        fd: int | None = None,
        num_rows: int = 1,
        row: int = 0,
    ) -> None:
        self._endpoints = {name: index for index, name in enumerate(dict.fromkeys([*endpoints, OTHER]))}
        self._statuses = {name: index for index, name in enumerate([*map(str, STATUSES), OTHER])}
        self._connections = len(self._endpoints) * len(self._statuses)  # index of their first cell in a row
        self._spans = self._connections + NUM_CONNECTION_CELLS
        self._lags = self._spans + NUM_SPAN_CELLS
        self._models = {name: index for index, name in enumerate(dict.fromkeys(models))}
        self._use = self._lags + NUM_LAG_CELLS
        self._row_length = self._use + len(self._models) * len(USE_CELLS)
        self._begin = row * self._row_length
        self._counts = map_counts(fd, num_rows * self._row_length)

    def count_response(self, endpoint: str, status: int) -> None:
        row = self._endpoints.get(endpoint, self._endpoints[OTHER])
        column = self._statuses.get(str(status), self._statuses[OTHER])
        self._counts[self._begin + row * len(self._statuses) + column] += 1

    def count_use(self, model: str, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """Count a request to a model, and its tokens."""
        index = self._models.get(model)
        if index is None:
            return
        first = self._begin + self._use + index * len(USE_CELLS)
        for cell, amount in enumerate((1, num_prompt_tokens, num_generated_tokens)):
            self._counts[first + cell] += amount

    def use_by_model(self) -> list[dict[str, str | int]]:
        """`USE_CELLS` of each model."""
        return [
            {
                "name": model,
                **{name: self._sum(self._use + index * len(USE_CELLS) + cell) for cell, name in enumerate(USE_CELLS)},
            }
            for model, index in self._models.items()
        ]

    def set_open_connections(self, num_connections: int) -> None:
        """Set the number of connections that this process has open."""
        self._counts[self._begin + self._connections] = num_connections

    def count_dropped_connection(self) -> None:
        """Count a connection that was closed or refused for lack of room."""
        self._counts[self._begin + self._connections + 1] += 1

    def count_spans(self, *, sent: int = 0, dropped: int = 0) -> None:
        """Count spans of traces; the caller sees to it that one thread at a time does."""
        self._counts[self._begin + self._spans] += sent
        self._counts[self._begin + self._spans + 1] += dropped

    def observe_lag(self, seconds: float) -> None:
        """Count a lag of this process's event loop; called by one thread alone."""
        first = self._begin + self._lags
        self._counts[first + bisect_left(SECONDS_OF_DELAY, seconds)] += 1
        self._counts[first + NUM_LAG_CELLS - 1] += round(1e9 * seconds)

    def collect(self, prefix: str) -> Iterator[Metric]:
        """The sums; requests that never happened are left out."""
        yield self._requests(prefix)
        num_open, num_dropped = (self._sum(self._connections + cell) for cell in range(NUM_CONNECTION_CELLS))
        yield GaugeMetricFamily(f"{prefix}:http_connections", "Open HTTP connections.", num_open)
        yield CounterMetricFamily(
            f"{prefix}:http_connections_dropped", "HTTP connections closed or refused for want of room.", num_dropped
        )
        num_sent, num_spans_dropped = (self._sum(self._spans + cell) for cell in range(NUM_SPAN_CELLS))
        yield CounterMetricFamily(f"{prefix}:trace_spans_sent", "Spans that the traces' collector took.", num_sent)
        yield CounterMetricFamily(
            f"{prefix}:trace_spans_dropped", "Spans that no collector took in time.", num_spans_dropped
        )
        *buckets, nanoseconds = (self._sum(self._lags + cell) for cell in range(NUM_LAG_CELLS))
        bounds = [*(repr(float(bound)) for bound in SECONDS_OF_DELAY), "+Inf"]
        yield HistogramMetricFamily(
            f"{prefix}:event_loop_lag_seconds",
            "How long what is ready waits for the event loop of an app process, in seconds.",
            buckets=list(zip(bounds, accumulate(buckets), strict=True)),
            sum_value=nanoseconds / 1e9,
        )

    def _sum(self, cell: int) -> int:
        """Over all app processes."""
        return sum(self._counts[cell :: self._row_length])

    def _requests(self, prefix: str) -> CounterMetricFamily:
        family = CounterMetricFamily(
            f"{prefix}:http_requests", "HTTP requests by endpoint and status.", labels=["endpoint", "status"]
        )
        for endpoint, row in self._endpoints.items():
            for status, column in self._statuses.items():
                place = row * len(self._statuses) + column
                if count := self._sum(place):
                    family.add_metric([endpoint, status], count)
        return family
