"""All draft tokens but the first as one submission: the steps that compute them are known before the first has ended.

Each reads the token that the one before has left on the device. So their inputs are sent in one copy and their kernels
launched as one CUDA graph, while the first step still runs, and the device never waits for the host in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

from tessera.engine.core.step_batch import StepBatch
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.runner.upload import StepUpload
from tessera.engine.tensor import Device

MAX_STEPS = 7  # of a chain; those behind are launched one by one
MAX_SEQS = 16  # beyond, a step takes the device longer than the host


class MakeInputs(Protocol):
    """Inputs of a shape, in the given upload from the given byte on."""

    def __call__(self, shape: StepShape, upload: StepUpload | None = None, first: int = 0) -> StepInputs: ...


Compute = Callable[[StepInputs, int, bool], None]  # from inputs, number of the draft token, whether filtered
MoreOf = Callable[[StepBatch], object]  # further arrays of a step


class DraftChain:
    """The steps of one padded number of sequences, as CUDA graphs by their number, and where their inputs lie."""

    def __init__(self, device: Device, num_seqs: int, num_steps: int, make_inputs: MakeInputs) -> None:
        """At most `num_steps` steps."""
        shape = StepShape(num_seqs, num_seqs, num_seqs)
        step_bytes = make_inputs(shape).nbytes
        self._upload = StepUpload(device, num_steps * step_bytes)
        self._inputs = [make_inputs(shape, self._upload, number * step_bytes) for number in range(num_steps)]
        self._step_bytes = step_bytes
        self._graphs: dict[tuple[int, bool, int], Any] = {}  # by steps, whether filtered, and longest context

    def capture(self, device: Any, compute: Compute, *, filtered: bool, max_context_len: int) -> None:
        """Capture any number of steps of contexts up to this length."""
        captured = [_for_contexts(each, max_context_len) for each in self._inputs]
        for count in range(1, len(captured) + 1):
            with device.capture() as finish:
                for number, inputs in enumerate(captured[:count], 1):
                    compute(inputs, number, filtered)
            self._graphs[count, filtered, max_context_len] = finish()

    def launch(self, steps: Sequence[StepBatch], more: Sequence[object], filtered: bool, max_context_len: int) -> None:
        """Submit `steps`, with the further arrays of each."""
        number, stage = self._upload.next_stage()
        for inputs, step, each in zip(self._inputs, steps, more, strict=False):
            # No other code writes to these inputs.
            inputs.write(step, None, each, number, stage, is_own=True)
        self._upload.submit(len(steps) * self._step_bytes)
        self._graphs[len(steps), filtered, max_context_len].launch()


class DraftChains:
    """Chains by padded numbers of sequences."""

    def __init__(self, short_context: int, max_model_len: int) -> None:
        """Contexts of at most `short_context` have graphs of their own."""
        self._contexts = sorted({min(short_context, max_model_len), max_model_len})
        self._chains: dict[int, DraftChain] = {}

    def capture(
        self,
        device: Any,
        sizes: Sequence[int],
        num_steps: int,
        make_inputs: MakeInputs,
        compute: Compute,
        *,
        filters: Sequence[bool],
    ) -> None:
        """Capture up to `num_steps` steps of these numbers of sequences."""
        num_steps = min(num_steps, MAX_STEPS)
        for size in sorted(size for size in sizes if size <= MAX_SEQS and num_steps > 0):
            chain = self._chains[size] = DraftChain(device, size, num_steps, make_inputs)
            for filtered in filters:
                for max_context_len in self._contexts:
                    chain.capture(device, compute, filtered=filtered, max_context_len=max_context_len)

    def launch(self, steps: Sequence[StepBatch], more_of: MoreOf) -> int:
        """Submit as many of `steps` as a chain has; -> their number, 0 where none has room for the sequences."""
        sizes = list(self._chains)
        num_seqs = steps[0].num_seqs if steps else MAX_SEQS + 1
        place = bisect_left(sizes, num_seqs)
        if place == len(sizes):
            return 0
        chained = steps[:MAX_STEPS]
        more = [more_of(step) for step in chained]
        longest = max(int(step.context_lens.max()) for step in chained)
        context = self._contexts[0] if longest <= self._contexts[0] else self._contexts[-1]
        filtered = chained[0].sampling.needs_filter
        self._chains[sizes[place]].launch(chained, more, filtered, context)
        return len(chained)


def _for_contexts(inputs: StepInputs, max_context_len: int) -> StepInputs:
    """The same inputs, of steps with contexts up to this length, which find the block tables up to date."""
    found = copy(inputs)
    found.updates = None
    found.attention = replace(inputs.attention, max_context_len=max_context_len)
    return found
