"""Turns of the engine's thread: the time that it spends beside the model's computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from tessera.engine.contract.histogram import SECONDS_OF_DELAY
from tessera.engine.contract.histogram_counts import Histogram
from tessera.engine.contract.stalls import StallWatch
from tessera.engine.core.core import Runner, Running
from tessera.engine.core.slot_table import BeginDraft
from tessera.engine.core.step_batch import Int32Array, StepBatch, StepResult, TokenMask


class Turns(CollectorRegistry):
    """Measures each turn: receiving, scheduling, postprocessing and sending, without the runner's work.

    Everybody's next token waits for it, so no request may make it long.

    Args:
        limit: seconds beyond which a turn is logged; 0 for none.
    """

    def __init__(self, model_name: str = "", limit: float = 0.0) -> None:
        super().__init__(auto_describe=False)
        self.gap = Histogram("The engine's thread between two computations, in seconds.", SECONDS_OF_DELAY)
        self._model_name = model_name
        self._watch = StallWatch("the engine's thread", limit)

    def begin(self) -> None:
        self._watch.begin()

    def end(self) -> None:
        self.gap.observe(self._watch.end())

    def work_on(self, request_id: str | None) -> None:
        """Until the next call the turn is that request's."""
        self._watch.request = request_id

    def begin_computation(self) -> None:
        self._watch.pause()

    def end_computation(self) -> None:
        self._watch.resume()

    def close(self) -> None:
        self._watch.close()

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self)

    def collect(self) -> list[Metric]:
        name = "tessera:engine_step_gap_seconds"
        family = HistogramMetricFamily(name, self.gap.documentation, labels=["model_name"])
        family.add_metric([self._model_name], self.gap.cumulative(), self.gap.total)
        return [family]


@dataclass
class TimedRunning:
    """A submitted step whose computation does not count."""

    running: Running
    turns: Turns

    def result(self) -> StepResult:
        self.turns.begin_computation()
        try:
            return self.running.result()
        finally:
            self.turns.end_computation()

    def drafts(self) -> Int32Array:
        self.turns.begin_computation()
        try:
            return self.running.drafts()
        finally:
            self.turns.end_computation()


class TimedRunner:
    """A runner whose computation does not count."""

    def __init__(self, runner: Runner, turns: Turns) -> None:
        self._runner = runner
        self._turns = turns

    @property
    def asynchronous(self) -> bool:
        return self._runner.asynchronous

    @property
    def full_sizes(self) -> tuple[int, ...]:
        return self._runner.full_sizes

    @property
    def num_awaited_graphs(self) -> int:
        return self._runner.num_awaited_graphs

    def start(self, batch: StepBatch) -> TimedRunning:
        self._turns.begin_computation()
        try:
            return TimedRunning(self._runner.start(batch), self._turns)
        finally:
            self._turns.end_computation()

    def timed(self, begin: BeginDraft) -> BeginDraft:
        """The same function of the runner's, whose time does not count."""

        def timed_begin(steps: tuple[StepBatch, ...]) -> None:
            self._turns.begin_computation()
            try:
                begin(steps)
            finally:
                self._turns.end_computation()

        return timed_begin

    def sample(self, running: Any, mask: TokenMask | None) -> None:
        self._turns.begin_computation()
        try:
            self._runner.sample(running.running, mask)
        finally:
            self._turns.end_computation()
