"""Counts of HTTP requests by endpoint and status, and of open connections, over all app processes."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

logger = logging.getLogger("tessera.app")

STATUSES = (200, 400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 499, 500, 503, 504, 507)
OTHER = "other"
NUM_CONNECTION_CELLS = 2  # open, dropped
BYTES_PER_COUNT = 8


class HttpCounts:
    """A row of counts per app process, written by that process alone; a scrape adds the rows up.

    The rows lie in the memory behind `fd`, from `make_shared_memory`, which the processes of one server share; None
    keeps them in this process. The set of labels is fixed: paths that are not among `endpoints` count as `other`.
    """

    def __init__(self, endpoints: Sequence[str], *, fd: int | None = None, num_rows: int = 1, row: int = 0) -> None:
        self._endpoints = {name: index for index, name in enumerate(dict.fromkeys([*endpoints, OTHER]))}
        self._statuses = {name: index for index, name in enumerate([*map(str, STATUSES), OTHER])}
        self._connections = len(self._endpoints) * len(self._statuses)  # index of their first cell in a row
        self._row_length = self._connections + NUM_CONNECTION_CELLS
        self._begin = row * self._row_length
        num_bytes = num_rows * self._row_length * BYTES_PER_COUNT
        self._counts = memoryview(_shared(fd, num_bytes) or bytearray(num_bytes)).cast("q")

    def count_response(self, endpoint: str, status: int) -> None:
        row = self._endpoints.get(endpoint, self._endpoints[OTHER])
        column = self._statuses.get(str(status), self._statuses[OTHER])
        self._counts[self._begin + row * len(self._statuses) + column] += 1

    def set_open_connections(self, num_connections: int) -> None:
        """Set the number of connections that this process has open."""
        self._counts[self._begin + self._connections] = num_connections

    def count_dropped_connection(self) -> None:
        """Count a connection that was closed or refused for lack of room."""
        self._counts[self._begin + self._connections + 1] += 1

    def collect(self, prefix: str) -> Iterator[Metric]:
        """The sums; requests that never happened are left out."""
        yield self._requests(prefix)
        num_open, num_dropped = (
            sum(self._counts[self._connections + cell :: self._row_length]) for cell in range(NUM_CONNECTION_CELLS)
        )
        yield GaugeMetricFamily(f"{prefix}:http_connections", "Open HTTP connections.", num_open)
        yield CounterMetricFamily(
            f"{prefix}:http_connections_dropped", "HTTP connections closed or refused for want of room.", num_dropped
        )

    def _requests(self, prefix: str) -> CounterMetricFamily:
        family = CounterMetricFamily(
            f"{prefix}:http_requests", "HTTP requests by endpoint and status.", labels=["endpoint", "status"]
        )
        for endpoint, row in self._endpoints.items():
            for status, column in self._statuses.items():
                place = row * len(self._statuses) + column
                if count := sum(self._counts[place :: self._row_length]):
                    family.add_metric([endpoint, status], count)
        return family


def make_shared_memory() -> int | None:
    """A descriptor of empty memory for several processes; None, with a line in the log, if there is no memory."""
    try:
        return os.memfd_create("http-counts")
    except OSError as error:
        logger.warning("HTTP requests are counted by each app process for itself: %s", error)
        return None


def _shared(fd: int | None, num_bytes: int) -> mmap.mmap | None:
    """The memory behind `fd`, all zeros at first; None if there is not enough.

    Every page is allocated before it is mapped: a page that is missing later would end the process (SIGBUS).
    """
    if fd is None:
        return None
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        return mmap.mmap(fd, num_bytes)
    except OSError as error:
        logger.warning("this app process counts HTTP requests for itself alone: %s", error)
        return None
