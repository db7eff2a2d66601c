"""The interface of workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def part(self, first: int, num_prompts: int) -> Workload:
        """`num_prompts` prompts from number `first` on: no others have the same ones, as far as there are enough."""

    def due_times(self) -> Sequence[float] | None:
        """Seconds after the start at which each job is due, ascending; None: the workload does not say."""
