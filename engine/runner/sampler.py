"""Samples token ids from a step's logits on the device, and downloads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.collectives.interface import Collectives
from tessera.engine.contract.messages import TokenLogprobs
from tessera.engine.contract.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, RowFlag
from tessera.engine.core.step_batch import SamplingBatch, SlotInit, StepBatch, StepResult, TokenMask
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.named_logprobs import NamedIds, NamedLogprobs, read_named
from tessera.engine.runner.sampling_slots import SamplingSlots, slot_init_bytes
from tessera.engine.runner.step_inputs import StepInputs, StepShape
from tessera.engine.runner.upload import StepUpload, aligned
from tessera.engine.tensor import Device, HostMemory, Mark, Tensor, empty, float32, int32, uint32, uint64, zeros

Array = np.ndarray[Any, Any]

OF_ALL_LOGITS = RowFlag.ADJUSTED | RowFlag.FILTERED | RowFlag.LOGPROBS
IN_FLIGHT = 4  # downloads at a time


class StepSampler:
    """Samples each row's token; a sequence's sampling state is kept in its slot.

    Attributes:
        newest: [num_slots] int32, the last token sampled in each slot: an input of the next step.
        slots: the slots' sampling state.
    """

    def __init__(
        self, ops: Ops, num_slots: int, vocab_size: int, max_model_len: int, max_drafts: int = 0, *, newest: Tensor
    ) -> None:
        """`max_drafts`: rows of a step behind draft tokens. `newest`: as the attribute, all zeros."""
        device = ops.device
        self._ops = ops
        self._vocab_size = vocab_size
        self.newest = newest
        num_rows = num_slots + max_drafts
        self._chosen = empty((num_rows,), int32, device)
        # Unadjusted logits of the rows with log-probabilities.
        self._raw_logits = empty((num_rows, vocab_size), float32, device)
        self._wanted_ids = empty((num_rows, 1), float32, device)
        masks = aligned(num_rows * mask_words(vocab_size) * uint32.itemsize) + 2 * aligned(num_rows * int32.itemsize)
        masks += NamedLogprobs.upload_bytes(num_rows)
        self._upload = StepUpload(device, max(masks, slot_init_bytes(max_model_len)))
        self._named_ids = NamedIds()
        self._named_logprobs = NamedLogprobs(ops, self._upload, num_rows, vocab_size)
        self.slots = SamplingSlots(ops, self._upload, num_slots, vocab_size)
        self._downloads = [ResultDownload(device, num_rows) for _ in range(IN_FLIGHT)]
        self._next_download = 0
        self._graphs: dict[tuple[StepShape, bool, bool], Any] = {}

    def init_slot(self, init: SlotInit) -> None:
        """Reset a slot's sampling state for a new sequence."""
        self.slots.init_slot(init)
        self._named_ids.init_slot(init)

    def capture(self, device: Any, logits: Tensor, inputs: StepInputs) -> None:
        """Capture sampling of all rows of `inputs` at once as CUDA graphs, adjusted or not and filtered or not."""
        for adjusted in (False, True):
            for filtered in (False, True):
                with device.capture() as finish:
                    self._choose(logits, inputs, adjusted=adjusted, filtered=filtered)
                self._graphs[inputs.shape, adjusted, filtered] = finish()

    def sample(self, logits: Tensor, inputs: StepInputs, batch: StepBatch, mask: TokenMask | None) -> ResultDownload:
        """Submit sampling and its download; logits [S', V] float32 with S' >= S rows are overwritten."""
        sampling, shape = batch.sampling, inputs.shape
        wants_logprobs = sampling.rows_with(RowFlag.LOGPROBS)
        graph = self._graphs.get((shape, sampling.needs_adjustment, sampling.needs_filter))
        rows = raw_logits = masked = named = staged = None
        if mask is not None or len(wants_logprobs):
            if mask is not None:
                masked = self._upload.stage_array(mask.words), self._upload.stage_array(mask.rows)
            rows = self._upload.stage_array(wants_logprobs)
            if len(wants_logprobs):
                named = self._named_ids.of_slots(sampling.slots[wants_logprobs].tolist())
            if named is not None:
                staged = self._named_logprobs.stage(named)
            self._upload.submit()
            if len(wants_logprobs):
                raw_logits = self._ops.embedding(rows, logits, out=self._raw_logits[: len(wants_logprobs)])
            graph = None  # captured without masks and log-probabilities
        in_rounds = bool(batch.rounds and sampling.flags & RowFlag.PENALIZED)
        if graph is not None and not in_rounds:
            graph.launch()
        elif in_rounds:
            self._choose_in_rounds(logits, inputs, batch.rounds, filtered=sampling.needs_filter, masked=masked)
        else:
            adjusted, filtered = sampling.needs_adjustment, sampling.needs_filter
            self._choose(logits, inputs, adjusted=adjusted, filtered=filtered, masked=masked)
        download = self._next()
        download.start(self._chosen[: batch.num_sampled])
        if rows is not None and raw_logits is not None:
            self._submit_logprobs(download, raw_logits, rows, wants_logprobs, shape, sampling)
            if named is not None and staged is not None:
                download.fetch_named(self._named_logprobs.launch(raw_logits, staged), named)
        download.finish()
        return download

    def download(self, chosen: Tensor) -> ResultDownload:
        """Submit the download of token ids [S] that were sampled elsewhere."""
        download = self._next()
        download.start(chosen)
        download.finish()
        return download

    def _next(self) -> ResultDownload:
        download = self._downloads[self._next_download]
        self._next_download = (self._next_download + 1) % len(self._downloads)
        return download

    def _choose(
        self,
        logits: Tensor,
        inputs: StepInputs,
        *,
        adjusted: bool,
        filtered: bool,
        masked: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Token ids into `_chosen` and `newest`; `masked` are the words of a `TokenMask` and its rows."""
        ops, state, rows = self._ops, self.slots.state, inputs.sampling_rows
        if adjusted:
            ops.adjust_logits(logits, state, rows)
        if masked is not None:
            ops.apply_token_mask(logits, *masked)
        chosen = self._chosen[: logits.shape[0]]
        ops.sample(logits, rows, filtered=filtered, out=chosen)
        ops.scatter(self.newest.view(self.newest.size, 1), inputs.slots, None, chosen)
        if adjusted:
            ops.record_tokens(state, inputs.slots, chosen)

    def _choose_in_rounds(
        self,
        logits: Tensor,
        inputs: StepInputs,
        rounds: tuple[int, ...],
        *,
        filtered: bool,
        masked: tuple[Tensor, Tensor] | None,
    ) -> None:
        """As `_choose`, adjusted, but round by round: each counts the tokens that those before have chosen.

        As long as a draft is accepted these are the draft's tokens. Behind them nothing counts, and the slot is
        initialised again.
        """
        ops, state, start = self._ops, self.slots.state, 0
        if masked is not None:
            ops.apply_token_mask(logits, *masked)
        for size in rounds:
            part = slice(start, start + size)
            rows, slots, chosen = inputs.sampling_rows[part], inputs.slots[part], self._chosen[part]
            ops.adjust_logits(logits[part], state, rows)
            ops.sample(logits[part], rows, filtered=filtered, out=chosen)
            ops.record_tokens(state, slots, chosen)
            start += size

    def _submit_logprobs(
        self,
        download: ResultDownload,
        raw_logits: Tensor,
        rows: Tensor,
        indices: Array,
        shape: StepShape,
        sampling: SamplingBatch,
    ) -> None:
        """raw_logits [n, V] are those of the sampled rows `rows` [n]."""
        counts = sampling.rows["num_logprobs"][indices]
        k = min(int(counts.max()), self._vocab_size)
        # Token ids are moved as bits, which is what a table of float32 does to them.
        table = Tensor(self._chosen.buffer, (shape.num_sampled, 1), float32, self._chosen.offset)
        moved = self._ops.embedding(rows, table, out=self._wanted_ids[: len(indices)])
        wanted = Tensor(moved.buffer, (len(indices),), int32, moved.offset)
        download.fetch_logprobs(self._ops.top_logprobs(raw_logits, wanted, k), indices, counts)


class SliceSampler:
    """One rank's part of sampling where several share the vocabulary, without gathering logits.

    Each has the highest logit of its slice; of the highest of all, it takes the best of its slice by noise less the
    distance from there. That is a row's token as `Ops.sample` defines it without filters, whichever slice it is in, and
    every rank knows it.
    """

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


class ResultDownload:
    """A step's D2H result: tokens and log-probabilities in pinned memory; reused once `result` was called."""

    def __init__(self, device: Device, num_slots: int) -> None:
        self._device = device
        columns = 1 + 2 + 2 * MAX_LOGPROBS  # token, its log-probability and rank, the alternatives
        columns += 1 + MAX_LOGPROB_TOKEN_IDS  # the named ids
        self._memory: HostMemory = device.pinned(num_slots * columns * int32.itemsize)
        self._arrived: Mark = device.event()

    def start(self, token_ids: Tensor) -> None:
        """Copy token_ids [S] int32."""
        self._used = 0
        self._logprobs: tuple[list[Array], Array, Array] | None = None
        self._named: tuple[list[tuple[int, ...]], Array, Array] | None = None
        self._token_ids = self._fetch(token_ids)

    def fetch_logprobs(self, results: tuple[Tensor, ...], indices: Array, counts: Array) -> None:
        """Copy `results` of `top_logprobs` for the sampled rows `indices`, with `counts` alternatives each."""
        self._logprobs = [self._fetch(tensor) for tensor in results], indices, counts

    def fetch_named(self, results: tuple[Tensor, Tensor], named: list[tuple[int, ...]]) -> None:
        """Copy `results` of `NamedLogprobs.launch` for the same rows."""
        scores, logits = results
        self._named = named, self._fetch(scores), self._fetch(logits)

    def finish(self) -> None:
        """All copies are submitted."""
        self._arrived.record()

    def _fetch(self, tensor: Tensor) -> Array:
        start = self._used
        self._used += tensor.nbytes
        array = self._memory.array[start : self._used].view(tensor.dtype).reshape(tensor.shape)
        if tensor.nbytes:
            self._device.download_small(array, tensor.pointer)
        return array

    def result(self) -> StepResult:
        """Wait for the copy; -> the tokens and log-probabilities."""
        self._arrived.synchronize()
        token_ids = self._token_ids.copy()
        if self._logprobs is None:
            return StepResult(token_ids)
        (chosen, rank, top_ids, top_values), indices, counts = self._logprobs
        named = self._named[0] if self._named is not None else []
        named_logprobs = read_named(*self._named) if self._named is not None else []
        found: list[TokenLogprobs | None] = [None] * len(token_ids)
        for index, (row, count) in enumerate(zip(indices.tolist(), counts.tolist(), strict=True)):
            if token_ids[row] < 0:
                continue
            is_named = bool(named and named[index])
            found[row] = TokenLogprobs(
                token_id=int(token_ids[row]),
                logprob=float(chosen[index]),
                rank=int(rank[index]),
                top_token_ids=list(named[index]) if is_named else top_ids[index, :count].tolist(),
                top_logprobs=named_logprobs[index] if is_named else top_values[index, :count].tolist(),
            )
        return StepResult(token_ids, found)


def mask_words(vocab_size: int) -> int:
    """Words of a row of a `TokenMask`."""
    return -(-vocab_size // 32)
