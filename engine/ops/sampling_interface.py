"""The operations that choose tokens from logits; see `tessera.engine.ops.interface`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from tessera.engine.contract.sampling_row import SAMPLING_ROW
from tessera.engine.ops.checks import CheckedOps, require
from tessera.engine.tensor import Tensor, empty, float32, int32, uint32, uint64


@dataclass(frozen=True)
class SamplingState:
    """The sampling state of each sequence, by slot; N slots, on the device.

    `token_state`: bit 31: the token is in the prompt; lower bits: its count in the output.
    """

    token_state: Tensor  # [N, V] uint32
    bias_token_ids: Tensor  # [N, MAX_LOGIT_BIAS] int32
    bias_values: Tensor  # [N, MAX_LOGIT_BIAS] float32
    bias_counts: Tensor  # [N] int32
    suppressed_token_ids: Tensor  # [N, MAX_SUPPRESSED] int32
    suppressed_counts: Tensor  # [N] int32


RANDOM_GROUP = 4  # token ids that share one call of the random generator
IN_PROMPT_BIT = np.uint32(1 << 31)


class SamplingOps(CheckedOps):
    """Letters: S sampled rows, V vocabulary, N slots. Logits are float32, changed in place.

    `rows` [S] SAMPLING_ROW are the parameters of the sampled rows (see `SamplingParams`); a row whose slot is below 0
    is padding: nothing happens to its logits, and its token is -1.
    """

    def reset_slot(self, state: SamplingState, slot: int, prompt_token_ids: Tensor, output_token_ids: Tensor) -> None:
        """Make `state.token_state[slot]` describe these tokens ([n] int32 each) and nothing else."""
        self._check(ids=prompt_token_ids, output=output_token_ids, token_state=state.token_state)
        self._reset_slot(state, slot, prompt_token_ids, output_token_ids)

    def adjust_logits(self, logits: Tensor, state: SamplingState, rows: Tensor) -> None:
        """Bias, suppression until min_tokens, and penalties, in place on logits [S, V] float32.

        bias is added; suppressed ids become -inf while position - num_prompt_tokens < min_tokens; tokens in
        prompt or output have positive logits divided, others multiplied by repetition_penalty; then
        frequency_penalty * count + presence_penalty * (count > 0) is subtracted.
        """
        self._check(logits=logits, token_state=state.token_state, rows=rows)
        require(logits.ndim == 2 and logits.dtype == float32, "adjust_logits", logits)
        require(rows.dtype == SAMPLING_ROW and rows.shape == logits.shape[:1], "adjust_logits", rows, logits)
        require(state.token_state.shape[1] == logits.shape[1], "adjust_logits", logits, state.token_state)
        if logits.size:
            self._adjust_logits(logits, state, rows)

    def apply_token_mask(self, logits: Tensor, words: Tensor, rows: Tensor) -> None:
        """-inf where a token may not be chosen, in place on rows [M] int32 of logits [S, V] float32.

        words [M, ceil(V / 32)] uint32: bit id % 32 of word id // 32 says that the token may. A row below 0
        is skipped, others are distinct and below S.
        """
        self._check(logits=logits, words=words, rows=rows)
        require(logits.ndim == 2 and logits.dtype == float32, "apply_token_mask", logits)
        num_words = -(-logits.shape[1] // 32)
        require(words.shape == (*rows.shape, num_words) and words.dtype == uint32, "apply_token_mask", words, rows)
        require(rows.ndim == 1 and rows.dtype == int32, "apply_token_mask", rows)
        if rows.size and logits.size:
            self._apply_token_mask(logits, words, rows)

    def sample(self, logits: Tensor, rows: Tensor, *, filtered: bool, out: Tensor | None = None) -> Tensor:
        """One token id per row of logits [S, V] float32 -> [S] int32; -1 where a row has NaN or no
        finite maximum.

        temperature 0: argmax, the lowest id on ties. Else the argmax over the kept tokens of
        logit / temperature - log(-log(u)), u uniform in (0, 1) from Philox4x32-10 (Salmon et al.
        2011) with key = seed (low word, high word) and counter = (id // 4, position, 0, 0), word
        id % 4, u = ((word >> 9) + 0.5) * 2^-23 (Gumbel 1954; a row's choice depends on nothing but its
        own logits, seed and position). Kept are the tokens that the row's filters leave (see `SamplingParams`).
        `filtered` False promises that no row has the flag FILTERED.
        """
        self._check(logits=logits, rows=rows, out=out)
        require(logits.ndim == 2 and logits.dtype == float32, "sample", logits)
        require(rows.dtype == SAMPLING_ROW and rows.shape == logits.shape[:1], "sample", rows, logits)
        out = self._out(out, logits.shape[:1], int32)
        if logits.size:
            self._sample(logits, rows, filtered, out)
        return out

    def best_of_slice(self, logits: Tensor, rows: Tensor, first: int, *, out: Tensor) -> None:
        """The highest logit of each row of a slice [S, W] float32 of the vocabulary, of the ids from `first` on.

        `out` [S] uint64 are choices: the higher, the higher the logit, then the lower its id; of padding 0.
        """
        self._check_slice(logits, rows, out)
        self._best_of_slice(logits, rows, first, out)

    def choose_in_slice(self, logits: Tensor, rows: Tensor, maxima: Tensor, first: int, *, out: Tensor) -> None:
        """The best of each row of a slice as `sample` chooses without filters; `maxima` [S] are of all slices.

        `out` [S] uint64, of which the highest over all slices is the row's choice; `first`: a multiple of RANDOM_GROUP.
        """
        self._check_slice(logits, rows, out)
        require(
            maxima.dtype == uint64 and maxima.shape == out.shape and first % RANDOM_GROUP == 0,
            "choose_in_slice",
            maxima,
        )
        self._choose_in_slice(logits, rows, maxima, first, out)

    def slice_tokens(self, maxima: Tensor, choices: Tensor, *, out: Tensor) -> None:
        """The tokens [S] int32 of the highest choices of all slices; -1 where the maximum is not finite."""
        self._check(maxima=maxima, choices=choices, out=out)
        require(maxima.dtype == choices.dtype == uint64 and out.dtype == int32, "slice_tokens", maxima, choices, out)
        require(maxima.shape == choices.shape == out.shape, "slice_tokens", maxima, choices, out)
        self._slice_tokens(maxima, choices, out)

    def _check_slice(self, logits: Tensor, rows: Tensor, out: Tensor) -> None:
        self._check(logits=logits, rows=rows, out=out)
        require(logits.ndim == 2 and logits.size > 0 and logits.dtype == float32, "a slice of logits", logits)
        require(rows.dtype == SAMPLING_ROW and rows.shape == logits.shape[:1], "a slice of logits", rows, logits)
        require(out.dtype == uint64 and out.shape == logits.shape[:1], "choices", out, logits)

    def record_tokens(self, state: SamplingState, slots: Tensor, token_ids: Tensor) -> None:
        """Count the sampled token_ids [S] in token_state[slots]; ids of -1 are skipped."""
        self._check(token_state=state.token_state, slots=slots, token_ids=token_ids)
        require(slots.shape == token_ids.shape and state.token_state.dtype == uint32, "record_tokens", slots)
        if slots.size:
            self._record_tokens(state, slots, token_ids)

    def top_logprobs(self, logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-softmax of logits [S, V] float32 at token_ids [S] and at the k most probable tokens.

        -> chosen [S] float32, rank [S] int32 (1 is the most probable), top_ids [S, k] int32 in order
        of falling probability (lowest id first on ties), top_logprobs [S, k] float32.
        """
        self._check(logits=logits, token_ids=token_ids)
        require(logits.ndim == 2 and logits.dtype == float32 and 0 <= k <= logits.shape[1], "top_logprobs", logits)
        num_rows = logits.shape[0]
        chosen = empty((num_rows,), float32, self.device)
        rank = empty((num_rows,), int32, self.device)
        top_ids = empty((num_rows, k), int32, self.device)
        top_values = empty((num_rows, k), float32, self.device)
        if num_rows:
            self._top_logprobs(logits, token_ids, chosen, rank, top_ids, top_values)
        return chosen, rank, top_ids, top_values

    @abstractmethod
    def _reset_slot(self, state: SamplingState, slot: int, prompt: Tensor, output: Tensor) -> None: ...
    @abstractmethod
    def _adjust_logits(self, logits: Tensor, state: SamplingState, rows: Tensor) -> None: ...
    @abstractmethod
    def _apply_token_mask(self, logits: Tensor, words: Tensor, rows: Tensor) -> None: ...
    @abstractmethod
    def _sample(self, logits: Tensor, rows: Tensor, filtered: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _best_of_slice(self, logits: Tensor, rows: Tensor, first: int, out: Tensor) -> None: ...
    @abstractmethod
    def _choose_in_slice(self, logits: Tensor, rows: Tensor, maxima: Tensor, first: int, out: Tensor) -> None: ...
    @abstractmethod
    def _slice_tokens(self, maxima: Tensor, choices: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _record_tokens(self, state: SamplingState, slots: Tensor, token_ids: Tensor) -> None: ...
    @abstractmethod
    def _top_logprobs(
        self,
        logits: Tensor,
        token_ids: Tensor,
        chosen: Tensor,
        rank: Tensor,
        top_ids: Tensor,
        top_values: Tensor,
    ) -> None: ...
