"""The interface of workloads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tessera.loadtest.workload.jobs import Job
from tessera.loadtest.workload.request_template import RequestTemplate


class Workload(Protocol):
    """Jobs in the order in which they are sent, the same for the same seed."""

    @property
    def num_prompts(self) -> int:
        """Jobs: single requests or whole conversations."""

    @property
    def num_requests(self) -> int:
        """Requests, if none fails."""

    def jobs(self, template: RequestTemplate) -> Iterator[Job]: ...

    def resized(self, num_prompts: int, seed: int) -> Workload:
        """Other work of the same kind."""
