"""Steps of the usual shapes, recorded once and replayed: the host pays one call for hundreds of kernels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

from tessera.engine.core.step_batch import StepBatch
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.tensor import Tensor

# Steps with prompts in them: beyond the largest, kernels take longer than launching them one by one. From 128 on a
# product's time grows with every tile of 128 rows.
FULL_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
# At these many multiprocessors are idle in the last round of a product's tiles: no step need be filled up to them.
UNEVEN_TOKENS = (640, 896, 1280, 1792)
PROMPT_TOKENS = tuple(sorted((*FULL_TOKENS, *UNEVEN_TOKENS)))
PROMPT_SEQS = (2, 9, 17, 33, 65, 129)  # one of them has the padded tokens

SHORT_CONTEXT_SEQS = 16  # decodes: up to so many are recorded for short contexts as well

MakeInputs = Callable[[StepShape, int, int], StepInputs]  # of a shape, its longest row's tokens, and its context
Forward = Callable[[StepInputs], Tensor]


class RecordedStep(NamedTuple):
    """A forward of one shape: fill `inputs`, launch `graph`, find `logits`."""

    inputs: StepInputs
    logits: Tensor
    graph: Any


class RecordedSteps:
    """A batch is padded to the smallest recorded shape that holds it.

    Padded rows store nothing and sample for nobody; padded tokens belong to padded rows. A few decodes whose contexts
    are at most `short_context` have recordings of their own.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_model_len: int, short_context: int) -> None:
        self._max_model_len = max_model_len
        self._short_context = short_context
        self._decode_sizes = decode_sizes(max_num_seqs)
        self._prompt_tokens = [size for size in PROMPT_TOKENS if size <= max_num_tokens]
        self._prompt_seqs = [*(size for size in PROMPT_SEQS if size <= max_num_seqs), max_num_seqs + 1]
        self._max_num_seqs = max_num_seqs
        self._steps: dict[StepShape, RecordedStep] = {}
        self._short_steps: dict[StepShape, RecordedStep] = {}

    @property
    def full_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens, ascending, to which a step with prompts in it had best be filled; none before `record`."""
        return tuple(size for size in self._prompt_tokens if size in FULL_TOKENS) if self._steps else ()

    def shapes(self) -> list[StepShape]:
        """All that are worth recording, largest first."""
        decodes = [StepShape(size, size, size) for size in self._decode_sizes]
        prompts = [
            self._prompt_shape(num_tokens, num_seqs)
            for num_tokens in self._prompt_tokens
            for num_seqs in self._prompt_seqs
        ]
        return sorted({*decodes, *prompts}, key=lambda shape: -shape.num_tokens)

    def record(self, device: Any, make_inputs: MakeInputs, forward: Forward) -> list[RecordedStep]:
        """Record a forward of each shape on a CUDA device; -> one of each shape of decodes."""

        def record(shape: StepShape, max_context_len: int) -> RecordedStep:
            inputs = make_inputs(shape, 1 if shape.is_decode else shape.num_tokens, max_context_len)
            with device.capture() as finish:
                logits = forward(inputs)
            return RecordedStep(inputs, logits, finish())

        for shape in self.shapes():
            self._steps[shape] = record(shape, self._max_model_len)
            if shape.is_decode and shape.num_seqs <= SHORT_CONTEXT_SEQS and self._max_model_len > self._short_context:
                self._short_steps[shape] = record(shape, self._short_context)
        return [step for shape, step in self._steps.items() if shape.is_decode]

    def find(self, batch: StepBatch) -> RecordedStep | None:
        """What to replay for a batch; None where it has to be launched kernel by kernel."""
        if not self._steps or batch.prompt_rows is not None:
            return None
        shape = StepShape.of(batch)
        if shape.is_decode:
            size = self._decode_sizes[bisect_left(self._decode_sizes, shape.num_seqs)]
            padded = StepShape(size, size, size)
            short = self._short_steps.get(padded)
            is_short = short is not None and batch.context_lens.max(initial=0) <= self._short_context
            return short if is_short else self._steps[padded]
        num_seqs = shape.num_seqs + 1  # one takes the padded tokens
        tokens = bisect_left(self._prompt_tokens, max(shape.num_tokens, num_seqs + 1))
        if tokens == len(self._prompt_tokens):
            return None
        seqs = self._prompt_seqs[bisect_left(self._prompt_seqs, num_seqs)]
        return self._steps[self._prompt_shape(self._prompt_tokens[tokens], seqs)]

    def _prompt_shape(self, num_tokens: int, num_seqs: int) -> StepShape:
        num_seqs = min(num_seqs, num_tokens - 1)  # else it would be the shape of a decode
        return StepShape(num_tokens, num_seqs, min(num_seqs, self._max_num_seqs))


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows that decode steps are recorded for."""
    sizes = [1, 2, 4]
    for step, limit in ((8, 64), (16, 128), (32, 256), (64, 1 << 30)):
        while sizes[-1] < min(limit, max_num_seqs):
            sizes.append(sizes[-1] // step * step + step)
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]
