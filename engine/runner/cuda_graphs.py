"""CUDA graphs of steps of common shapes: the host replays hundreds of kernels with one call."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tessera.engine.contract.errors import OutOfMemoryError
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.tensor import Tensor

logger = logging.getLogger(__name__)

# Steps with prompts: beyond the largest, those of all but the smallest models take longer than launching their kernels
# one by one. From 128 on, a GEMM's time grows with every tile of 128 rows.
FULL_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
# Likewise for ops that dequantise weights in longer steps: the more tokens share that, the better. Without 1,536, the
# first tokens of 256 streams come 55 % later for less than 1 % of throughput (on virtual time).
FULL_TOKENS_DEQUANTISED = (16, 32, 64, 128, 256, 1536, 2048)
# At these sizes multiprocessors idle in the last wave of a GEMM's tiles, so steps are not filled up to them.
UNEVEN_TOKENS = (640, 896, 1280, 1792)
PROMPT_TOKENS = tuple(sorted((*FULL_TOKENS, *UNEVEN_TOKENS)))
PROMPT_SEQS = (2, 9, 17, 33, 65, 129)  # including a row for the padded tokens

MAX_VERIFIED_TOKENS = 512  # up to so many tokens, steps that verify drafts have graphs

MAX_SHORT_CONTEXT_SEQS = 16  # up to so many decodes have graphs for short contexts too

MakeInputs = Callable[[StepShape, int, int], StepInputs]  # from shape, most tokens of a row, longest context
Forward = Callable[[StepInputs], Tensor]


class StepGraph(NamedTuple):
    """The CUDA graph of a forward of one shape: fill `inputs`, launch `graph`, read `logits`."""

    inputs: StepInputs
    logits: Tensor
    graph: Any


class StepGraphs:
    """CUDA graphs by shape; a batch is padded to the smallest shape that holds it.

    Padded rows store nothing and sample nothing; padded tokens belong to padded rows. Small decodes with contexts of at
    most `short_context` have graphs of their own.

    There are five times as many shapes with prompts as without, and capturing them takes a third of a start. So they
    can be left until they are needed, or until there is nothing else to do: see `capture`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        short_context: int,
        max_rows: int | None = None,
        max_drafts: int = 0,
        draft_tokens: int = 0,
        full_tokens: Sequence[int] = FULL_TOKENS,
    ) -> None:
        """`max_rows`: of a step with prompts, if sequences may have several rows. `full_tokens`: see `full_sizes`.

        Steps verify at most `max_drafts` draft tokens, of each sequence at most `draft_tokens`.
        """
        self._max_model_len = max_model_len
        self._short_context = short_context
        self._decode_sizes = decode_sizes(max_num_seqs)
        self._prompt_tokens = [size for size in PROMPT_TOKENS if size <= max_num_tokens]
        largest = {max_num_seqs + 1, (max_rows or max_num_seqs) + 1}
        self._prompt_seqs = [*(size for size in PROMPT_SEQS if size <= max_num_seqs), *sorted(largest)]
        self._max_num_seqs = max_num_seqs
        self._draft_tokens = draft_tokens
        self._full_tokens = full_tokens
        sizes = decode_sizes(max_num_seqs + max_drafts) if max_drafts else []
        self._verified_sizes = [size for size in sizes if 1 < size <= min(MAX_VERIFIED_TOKENS, max_num_tokens)]
        self._verified_shapes = [StepShape(size, size, size, verifies=True) for size in self._verified_sizes]
        self._steps: dict[StepShape, StepGraph] = {}
        self._short_steps: dict[StepShape, StepGraph] = {}
        self._capture: Callable[[StepShape, int], StepGraph]
        self._left: dict[StepShape, None] = {}  # without a graph yet, those that are needed most often first
        self.num_awaited = 0  # graphs that were captured while a step waited

    @property
    def full_sizes(self) -> tuple[int, ...]:
        """Numbers of tokens, ascending, to which a step with prompts is best filled; none before `capture`."""
        return tuple(size for size in self._prompt_tokens if size in self._full_tokens) if self._steps else ()

    @property
    def recorded(self) -> list[StepGraph]:
        """Of each shape, once it is captured, without those for short contexts."""
        return list(self._steps.values())

    def shapes(self) -> list[StepShape]:
        """All shapes to capture, largest first."""
        decodes = [StepShape(size, size, size) for size in self._decode_sizes]
        prompts = [
            self._prompt_shape(num_tokens, num_seqs)
            for num_tokens in self._prompt_tokens
            for num_seqs in self._prompt_seqs
        ]
        return sorted({*decodes, *prompts, *self._verified_shapes}, key=lambda shape: -shape.num_tokens)

    def capture(
        self, device: Any, make_inputs: MakeInputs, forward: Forward, *, leaves_prompts: bool = False
    ) -> list[StepGraph]:
        """Capture a forward of each shape on a CUDA device; -> the graphs of decodes and of verified drafts.

        `leaves_prompts`: shapes with prompts are captured when they are needed, or by `capture_next` before.
        """

        def capture(shape: StepShape, max_context_len: int) -> StepGraph:
            inputs = make_inputs(shape, self._most_tokens_of_row(shape), max_context_len)
            with device.capture() as finish:
                logits = forward(inputs)
            return StepGraph(inputs, logits, finish())

        self._capture = capture
        shapes = self.shapes()
        left = [shape for shape in shapes if leaves_prompts and not (shape.is_decode or shape.verifies)]
        self._left = dict.fromkeys(sorted(left, key=lambda shape: (shape.num_seqs, shape.num_tokens)))
        for shape in shapes:
            if shape in self._left:
                continue
            self._steps[shape] = capture(shape, self._max_model_len)
            if (
                shape.is_decode
                and shape.num_seqs <= MAX_SHORT_CONTEXT_SEQS
                and self._max_model_len > self._short_context
            ):
                self._short_steps[shape] = capture(shape, self._short_context)
        return [step for shape, step in self._steps.items() if shape.is_decode or shape.verifies]

    def capture_next(self) -> bool:
        """Capture a shape that was left; False once there is none. Not while a step is being submitted."""
        shape = next(iter(self._left), None)
        if shape is None:
            return False
        self._step_of(shape)
        return True

    def _step_of(self, shape: StepShape) -> StepGraph | None:
        """None where memory was too short for the graph of a shape that was left."""
        if shape in self._left:
            del self._left[shape]
            try:
                self._steps[shape] = self._capture(shape, self._max_model_len)
            except OutOfMemoryError as error:
                logger.warning("steps of %d tokens are launched kernel by kernel: %s", shape.num_tokens, error)
        return self._steps.get(shape)

    def _most_tokens_of_row(self, shape: StepShape) -> int:
        if shape.verifies:
            return min(self._draft_tokens + 1, shape.num_tokens)
        return 1 if shape.is_decode else shape.num_tokens

    def find(self, batch: StepBatch) -> StepGraph | None:
        """The graph to replay for a batch; None if it must be launched kernel by kernel."""
        if not self._steps or batch.prompt_rows is not None:
            return None
        if batch.verifies:
            return self._find_verified(batch)
        shape = StepShape.of(batch)
        if shape.is_decode:
            size = self._decode_sizes[bisect_left(self._decode_sizes, shape.num_seqs)]
            padded = StepShape(size, size, size)
            short = self._short_steps.get(padded)
            is_short = short is not None and batch.context_lens.max(initial=0) <= self._short_context
            return short if is_short else self._steps[padded]
        # One row takes the padded tokens. Beside prompts a draft's row is sampled several times.
        num_seqs = max(shape.num_seqs + 1, shape.num_sampled)
        tokens = bisect_left(self._prompt_tokens, max(shape.num_tokens, num_seqs + 1))
        seqs = bisect_left(self._prompt_seqs, num_seqs)
        if tokens == len(self._prompt_tokens) or seqs == len(self._prompt_seqs):
            return None
        padded = self._prompt_shape(self._prompt_tokens[tokens], self._prompt_seqs[seqs])
        if padded.num_sampled < shape.num_sampled:
            return None
        self.num_awaited += padded in self._left
        return self._step_of(padded)

    def _find_verified(self, batch: StepBatch) -> StepGraph | None:
        """Each token may be a row, and is sampled; padded tokens are rows of their own."""
        place = bisect_left(self._verified_sizes, batch.num_tokens)
        # There is a round of sampled rows for each token of the longest row.
        if place == len(self._verified_sizes) or len(batch.rounds) > self._draft_tokens + 1:
            return None
        return self._steps[self._verified_shapes[place]]

    def _prompt_shape(self, num_tokens: int, num_seqs: int) -> StepShape:
        num_seqs = min(num_seqs, num_tokens - 1)  # else it would be the shape of a decode
        return StepShape(num_tokens, num_seqs, min(num_seqs, self._max_num_seqs))


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows with a graph for decode steps."""
    sizes = [1, 2, 4]
    for step, limit in ((8, 64), (16, 128), (32, 256), (64, 1 << 30)):
        while sizes[-1] < min(limit, max_num_seqs):
            sizes.append(sizes[-1] // step * step + step)
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]
