"""Counts of HTTP requests by endpoint and status, over all app processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily

STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 499, 500, 503, 504)
OTHER = "other"
BYTES_PER_COUNT = 8


class HttpCounts:
    """A row of counts per app process, written by that process alone; a scrape adds the rows up.

    The rows lie in `file`, memory that the processes of one server share; None keeps them in this process. The set of
    labels is fixed: paths that are not among `endpoints` count as `other`.
    """

    def __init__(self, endpoints: Sequence[str], *, file: str | None = None, num_rows: int = 1, row: int = 0) -> None:
        self._endpoints = {name: index for index, name in enumerate(dict.fromkeys([*endpoints, OTHER]))}
        self._statuses = {name: index for index, name in enumerate([*map(str, STATUSES), OTHER])}
        self._row_length = len(self._endpoints) * len(self._statuses)
        self._begin = row * self._row_length
        num_bytes = num_rows * self._row_length * BYTES_PER_COUNT
        self._counts = memoryview(_shared(Path(file), num_bytes) if file else bytearray(num_bytes)).cast("q")

    def count_response(self, endpoint: str, status: int) -> None:
        row = self._endpoints.get(endpoint, self._endpoints[OTHER])
        column = self._statuses.get(str(status), self._statuses[OTHER])
        self._counts[self._begin + row * len(self._statuses) + column] += 1

    def collect(self, prefix: str) -> CounterMetricFamily:
        """The sums as `PREFIX:http_requests_total{endpoint, status}`; zeros are left out."""
        family = CounterMetricFamily(
            f"{prefix}:http_requests", "HTTP requests by endpoint and status.", labels=["endpoint", "status"]
        )
        for endpoint, row in self._endpoints.items():
            for status, column in self._statuses.items():
                place = row * len(self._statuses) + column
                if count := sum(self._counts[place :: self._row_length]):
                    family.add_metric([endpoint, status], count)
        return family


def _shared(file: Path, num_bytes: int) -> mmap.mmap:
    """The file's memory, all zeros at first; the first process creates the file."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
