"""Samples where ranks share the vocabulary, without gathering logits.

Each rank has the highest logit of its slice; of the highest of all, it takes the best of its slice by noise less the
distance from there. That is a row's token as `Ops.sample` defines it without filters, whichever slice it is in, and
every rank knows it.
"""

from __future__ import annotations

from typing import Any

from tessera.engine.collectives.interface import Collectives
from tessera.engine.contract.sampling_params import RowFlag
from tessera.engine.core.step_batch import StepBatch, TokenMask
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.tensor import Tensor, int32, uint64, zeros

OF_ALL_LOGITS = RowFlag.ADJUSTED | RowFlag.FILTERED | RowFlag.LOGPROBS


class SliceSampler:
    """One rank's part."""

    def __init__(self, ops: Ops, ranks: Collectives, newest: Tensor, num_rows: int, first_token: int) -> None:
        """`newest` [num_slots] int32 gets the tokens; the slice begins with `first_token`."""
        self._ops, self._ranks, self._newest, self._first = ops, ranks, newest, first_token
        self._maxima, self._choices = (zeros((num_rows,), uint64, ops.device) for _ in range(2))
        self._chosen = zeros((num_rows,), int32, ops.device)
        self._graphs: dict[tuple[StepShape, bool], Any] = {}

    @staticmethod
    def suffices(batch: StepBatch, mask: TokenMask | None) -> bool:
        """Whether no row needs the logits of the whole vocabulary."""
        return mask is None and not batch.rounds and not batch.sampling.flags & OF_ALL_LOGITS

    def capture(self, device: Any, logits: Tensor, inputs: StepInputs) -> None:
        """Capture it for all rows of `inputs` as CUDA graphs, with chance and without."""
        for by_chance in (False, True):
            with device.capture() as finish:
                self._choose(logits, inputs, by_chance=by_chance)
            self._graphs[inputs.shape, by_chance] = finish()

    def sample(self, logits: Tensor, inputs: StepInputs, batch: StepBatch) -> Tensor:
        """-> token ids [S], of a slice's logits [S', W] with S' >= S rows."""
        by_chance = bool((batch.sampling.rows["temperature"] > 0.0).any())
        graph = self._graphs.get((inputs.shape, by_chance))
        if graph is not None:
            graph.launch()
        else:
            self._choose(logits, inputs, by_chance=by_chance)
        return self._chosen[: batch.num_sampled]

    def _choose(self, logits: Tensor, inputs: StepInputs, *, by_chance: bool) -> None:
        ops, ranks, rows, count = self._ops, self._ranks, inputs.sampling_rows, logits.shape[0]
        maxima = choices = self._maxima[:count]
        ops.best_of_slice(logits, rows, self._first, out=maxima)
        ranks.all_reduce_max(maxima)
        if by_chance:
            choices = self._choices[:count]
            ops.choose_in_slice(logits, rows, maxima, self._first, out=choices)
            ranks.all_reduce_max(choices)
        chosen = self._chosen[:count]
        ops.slice_tokens(maxima, choices, out=chosen)
        ops.scatter(self._newest.view(self._newest.size, 1), inputs.slots, None, chosen)
