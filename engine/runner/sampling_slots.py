"""The sampling state of each sequence between steps, on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.contract.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, RowFlag
from tessera.engine.core.step_batch import SlotInit
from tessera.engine.models.config import MAX_EOS_TOKEN_IDS
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.sampling_interface import SamplingState
from tessera.engine.runner.upload import StepUpload, aligned
from tessera.engine.tensor import Tensor, empty, float32, int32, uint32, zeros

MAX_SUPPRESSED = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS


class SamplingSlots:
    """`state` for `num_slots` sequences; a slot is overwritten when the next sequence takes it.

    Only the state that a sequence needs is written: token counts for penalties, biases, suppressed ids. A plain
    sequence copies nothing, and none waits for the device.
    """

    def __init__(self, ops: Ops, upload: StepUpload, num_slots: int, vocab_size: int) -> None:
        """`upload` has room for `slot_init_bytes`; others may use it in between."""
        device = ops.device
        self._ops = ops
        self._upload = upload
        self.state = SamplingState(
            token_state=zeros((num_slots, vocab_size), uint32, device),  # counts of rows without penalties, too
            bias_token_ids=empty((num_slots, MAX_LOGIT_BIAS), int32, device),
            bias_values=empty((num_slots, MAX_LOGIT_BIAS), float32, device),
            bias_counts=zeros((num_slots,), int32, device),
            suppressed_token_ids=empty((num_slots, MAX_SUPPRESSED), int32, device),
            suppressed_counts=zeros((num_slots,), int32, device),
        )
        self._bias_counts = np.zeros(num_slots, np.int32)  # what the device holds
        self._suppressed_counts = np.zeros(num_slots, np.int32)

    def init_slot(self, init: SlotInit) -> None:
        """Make `init.slot` describe this sequence and nothing else."""
        state, slot, params = self.state, init.slot, init.params
        stage = self._upload.stage_array
        moves: list[tuple[Tensor, Tensor]] = []

        def write(target: Tensor, values: Any) -> None:
            array = np.array(values, target.dtype)
            moves.append((target[: len(array)], stage(array)))

        def write_count(target: Tensor, known: np.ndarray[tuple[int], np.dtype[np.int32]], count: int) -> None:
            if known[slot] != count:
                known[slot] = count
                write(target[slot : slot + 1], [count])

        tokens = None
        if params.flags & RowFlag.PENALIZED:
            tokens = (
                stage(np.array(init.prompt_token_ids, np.int32)),
                stage(np.array(init.output_token_ids, np.int32)),
            )
        if params.logit_bias:
            write(state.bias_token_ids[slot], list(params.logit_bias))
            write(state.bias_values[slot], list(params.logit_bias.values()))
        suppressed = init.suppressed_token_ids if params.min_tokens else ()
        if suppressed:
            write(state.suppressed_token_ids[slot], suppressed)
        write_count(state.bias_counts, self._bias_counts, len(params.logit_bias))
        write_count(state.suppressed_counts, self._suppressed_counts, len(suppressed))
        if tokens is None and not moves:
            return
        self._upload.submit()
        if tokens is not None:
            self._ops.reset_slot(state, slot, *tokens)
        for target, source in moves:
            self._ops.device.copy_small(target.pointer, source.pointer, source.nbytes)


def slot_init_bytes(max_model_len: int) -> int:
    """Most bytes that `SamplingSlots.init_slot` uploads."""
    tokens = (max_model_len + 1) * int32.itemsize
    lists = 2 * MAX_LOGIT_BIAS + MAX_SUPPRESSED + 2
    return aligned(tokens) + aligned(lists * int32.itemsize) + 8 * aligned(1)
