"""A stand-in for a device that captures CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tessera.engine.runner.step_inputs import StepInputs
from tessera.engine.tensor import Tensor


class Replay:
    def __init__(self, forward: Callable[[StepInputs], Tensor], inputs: StepInputs) -> None:
        self.forward, self.inputs, self.launches = forward, inputs, 0

    def launch(self) -> None:
        self.launches += 1
        self.forward(self.inputs)


class Recorder:
    """Stands in for a CUDA device's `capture`."""

    def __init__(self) -> None:
        self.replays: list[Replay] = []
        self.forwarded: Any = None

    @contextmanager
    def capture(self) -> Iterator[Callable[[], Replay]]:
        def finish() -> Replay:
            self.replays.append(Replay(*self.forwarded))
            return self.replays[-1]

        yield finish
