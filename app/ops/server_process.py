"""The server's first process as Prometheus' clients describe processes: start, CPU time, memory, descriptors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric


class ServerProcess:
    """Always the first process, whichever app process answers, so that its counters never go back.

    Args:
        app_process: number of this process; those after 0 are children of the first.
    """

    def __init__(self, app_process: int) -> None:
        pid = os.getppid() if app_process else os.getpid()
        self._collector = ProcessCollector(pid=lambda: pid, registry=CollectorRegistry())

    async def metrics(self) -> Sequence[Metric]:
        """Without the server's prefix, because dashboards of all kinds of programs read these names.

        Read in a thread: the system takes 30 ms to list the descriptors of some thousands of connections.
        """
        return await asyncio.to_thread(lambda: list(self._collector.collect()))
