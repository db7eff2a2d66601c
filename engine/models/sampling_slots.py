"""What sampling remembers of each sequence between steps, on the device."""

from __future__ import annotations

import numpy as np

from engine.models.config import MAX_EOS_TOKEN_IDS
from engine.ops.interface import Ops
from engine.ops.sampling_interface import SamplingState
from engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from engine.tensor import Tensor, empty, float32, int32, uint32, zeros

MAX_SUPPRESSED = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS


class SamplingSlots:
    """`state` for `num_slots` sequences; a slot is overwritten when the next sequence enters it.

    Only what a sequence needs is written: token counts where it has penalties, biases and suppressed
    ids where it has any. Entering a plain sequence copies nothing.
    """

    def __init__(self, ops: Ops, num_slots: int, vocab_size: int, max_model_len: int) -> None:
        device = ops.device
        self._ops = ops
        self.state = SamplingState(
            token_state=empty((num_slots, vocab_size), uint32, device),
            bias_token_ids=empty((num_slots, MAX_LOGIT_BIAS), int32, device),
            bias_values=empty((num_slots, MAX_LOGIT_BIAS), float32, device),
            bias_counts=zeros((num_slots,), int32, device),
            suppressed_token_ids=empty((num_slots, MAX_SUPPRESSED), int32, device),
            suppressed_counts=zeros((num_slots,), int32, device),
        )
        self._bias_counts = np.zeros(num_slots, np.int32)  # what the device holds
        self._suppressed_counts = np.zeros(num_slots, np.int32)
        self._token_ids = empty((max_model_len + 1,), int32, device)

    def enter(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: list[int],
        output_token_ids: list[int],
        suppressed_token_ids: tuple[int, ...],
    ) -> None:
        """Make `slot` describe this sequence and nothing else."""
        state = self.state
        if params.has_penalties:
            prompt_end = len(prompt_token_ids)
            end = prompt_end + len(output_token_ids)
            self._token_ids[:end].upload(np.array([*prompt_token_ids, *output_token_ids], np.int32))
            self._ops.reset_slot(state, slot, self._token_ids[:prompt_end], self._token_ids[prompt_end:end])
        if params.logit_bias:
            biased = len(params.logit_bias)
            state.bias_token_ids[slot][:biased].upload(np.array(list(params.logit_bias), np.int32))
            state.bias_values[slot][:biased].upload(np.array(list(params.logit_bias.values()), np.float32))
        suppressed = suppressed_token_ids if params.min_tokens else ()
        if suppressed:
            state.suppressed_token_ids[slot][: len(suppressed)].upload(np.array(suppressed, np.int32))
        _set_count(state.bias_counts, self._bias_counts, slot, len(params.logit_bias))
        _set_count(state.suppressed_counts, self._suppressed_counts, slot, len(suppressed))


def _set_count(counts: Tensor, known: np.ndarray[tuple[int], np.dtype[np.int32]], slot: int, count: int) -> None:
    if known[slot] != count:
        known[slot] = count
        counts[slot : slot + 1].upload(known[slot : slot + 1])
