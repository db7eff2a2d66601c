"""Runs a model whose weights several ranks share: every step on all of them, sampled by rank 0.

Ranks are threads of the engine process. A step's host work is one upload and one CUDA graph for each, so a process for
each would add messages and save little; and threads of one process see each other's memory, on the CPU and by peer
access on GPUs, without handles to pass around.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tessera.engine.collectives.cpu import CpuCollectives, RankMemory
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import RankError
from tessera.engine.core.step_batch import Int32Array, StepBatch, StepResult, TokenMask
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.partition import Partition, Rank
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner, Progress, RunningStep
from tessera.engine.tensor import CpuDevice, Tensor

RANK_TIMEOUT = 4.0  # seconds; with a look it is noticed within five

logger = logging.getLogger("tessera.engine")

T = TypeVar("T")
MakeRunner = Callable[[int], ModelRunner]


class ParallelRunner:
    """One ModelRunner for each rank; rank 0's work is done in the thread that calls.

    Attributes:
        first, others: rank 0's, and those of the others.
        rendezvous: what is known of each rank.
        weight_bytes, kv_cache_bytes: of each rank.
        stored_bytes: of all ranks together; see `ModelRunner`.
    """

    def __init__(self, rendezvous: Rendezvous, make: MakeRunner, reports: Callable[[], list[str]] = list) -> None:
        """`make`: a rank's runner; called in its thread. `reports`: of the devices about a failure."""
        self.rendezvous = rendezvous
        self._reports = reports
        self._reported: set[str] = set()
        self._threads = [ThreadPoolExecutor(1, f"rank-{index}") for index in range(1, rendezvous.size)]

        def made(index: int) -> ModelRunner:
            rendezvous.begin(index)
            return make(index)

        calls = [partial(made, index) for index in range(rendezvous.size)]
        self.first, self.others = self._on_all(calls, patient=True)
        runners = (self.first, *self.others)
        gc.collect()  # what start-up left, while no rank is at work
        for runner in runners:
            runner.device.hold_garbage()
        self.stored_bytes = dict(sum((Counter(runner.stored_bytes) for runner in runners), Counter()).most_common())
        self.weight_bytes = tuple(runner.weight_bytes for runner in runners)
        self.kv_cache_bytes = tuple(runner.kv_cache_bytes for runner in runners)

    @property
    def planes(self) -> list[Tensor]:
        """Of the KV caches of all ranks, in which a block has its parts."""
        return [plane for runner in (self.first, *self.others) for plane in runner.kv_cache.planes]

    @property
    def asynchronous(self) -> bool:
        return self.first.asynchronous

    @property
    def full_sizes(self) -> tuple[int, ...]:
        return self.first.full_sizes

    @property
    def num_awaited_graphs(self) -> int:
        return self.first.num_awaited_graphs

    def start(self, batch: StepBatch) -> RunningRanks:
        """See `ModelRunner.start`. Raises: RankError, and what rank 0 raises."""
        first, others = self._on_all([partial(runner.start, batch) for runner in self._runners])
        for state in self.rendezvous.states:
            state.steps += 1
        return RunningRanks(first, others, self)

    def sample(self, running: RunningRanks, mask: TokenMask | None = None) -> None:
        """See `ModelRunner.sample`."""
        steps = zip(self._runners, (running.first, *running.others), strict=True)
        self._on_all([partial(runner.sample, step, mask) for runner, step in steps])

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        if not self.rendezvous.has_failed:
            for runner in self._runners:
                runner.device.synchronize()
                runner.device.release_garbage()

    @property
    def _runners(self) -> tuple[ModelRunner, ...]:
        return (self.first, *self.others)

    def _on_all(self, calls: Sequence[Callable[[], T]], *, patient: bool = False) -> tuple[T, list[T]]:
        """Call one for each rank in its thread; -> what they return, rank 0's apart.

        `patient`: ranks may differ in the time that they take.

        Raises: what the first of them raised that failed by itself; RankError for one that does not end.
        """
        futures = [
            thread.submit(self._guarded, index, calls[index]) for index, thread in enumerate(self._threads, start=1)
        ]
        errors: list[BaseException] = []
        results: list[T] = []
        try:
            results.append(self._guarded(0, calls[0]))
        except BaseException as error:
            errors.append(error)
        for index, future in enumerate(futures, start=1):
            try:
                results.append(future.result(None if patient and not errors else self.rendezvous.timeout))
            except TimeoutError:
                errors.append(RankError(f"rank {index} does not end its step"))
            except BaseException as error:
                errors.append(error)
        if errors:
            raise next((error for error in errors if not isinstance(error, RankError)), errors[0])
        return results[0], results[1:]

    def _guarded(self, index: int, call: Callable[[], T]) -> T:
        """The others learn of its error, wherever they wait."""
        try:
            return call()
        except BaseException as error:
            self._fail(index, error)
            raise

    def result_of(self, first: RunningStep) -> StepResult:
        """Of rank 0's step."""
        return self._guarded(0, first.result)

    def _fail(self, index: int, error: BaseException) -> None:
        if not isinstance(error, RankError):
            logger.error("rank %d failed at %s: %s", index, self.rendezvous.states[index].stage, error)
        self.rendezvous.fail(index, error)
        for report in self._reports():
            if report not in self._reported:
                self._reported.add(report)
                logger.error("%s", report)


@dataclass
class RunningRanks:
    """A submitted step of all ranks."""

    first: RunningStep
    others: list[RunningStep]
    runner: ParallelRunner

    def result(self) -> StepResult:
        return self.runner.result_of(self.first)

    def drafts(self) -> Int32Array:
        return self.first.drafts()


def make_cpu_runner(
    config: EngineConfig,
    model: ModelConfig,
    progress: Progress | None = None,
    on_hang: Callable[[RankError], None] | None = None,
) -> ParallelRunner:
    """Ranks of a model on the CPU. Raises: ConfigError, ModelError."""
    size = config.tensor_parallel_size
    Partition(model, Rank(0, size))  # refused before threads begin
    rendezvous = Rendezvous(size, RANK_TIMEOUT, on_hang or end_process)
    memory = RankMemory(rendezvous)

    def make(index: int) -> ModelRunner:
        device = CpuDevice()
        own_progress = noted(rendezvous, index, progress)
        return ModelRunner(config, model, device, make_ops(device), own_progress, CpuCollectives(index, memory))

    return ParallelRunner(rendezvous, make)


def noted(stages: Rendezvous, index: int, progress: Progress | None) -> Progress:
    """A rank's progress for the log, and rank 0's for `progress`."""

    def note(stage: str, done: int, total: int) -> None:
        stages.states[index].stage = f"{stage}, {done} of {total}"
        if index == 0 and progress is not None:
            progress(stage, done, total)

    return note


def end_process(error: RankError) -> None:
    """The rank that hangs may be the engine's own thread: nothing but the end of the process helps."""
    logger.error("the engine ends: %s", error)
    os._exit(1)
