"""Penalties, masks, filters, choice of tokens and log-probabilities, all on logits in float32."""

from __future__ import annotations

from typing import NamedTuple

from engine.cuda.device import CudaDevice
from engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from engine.ops.cuda.types import WARP_SIZE, ceil_div
from engine.ops.interface import Ops
from engine.ops.sampling_interface import SamplingMetadata, SamplingState
from engine.tensor import Tensor, empty, uint32, uint64

ADJUST_LOGITS = KernelSpec(
    file="penalties.cu",
    name="adjust_logits_kernel",
    template=(),
    parameters=(
        ("logits", "pointer"),
        ("token_state", "pointer"),
        ("bias_token_ids", "pointer"),
        ("bias_values", "pointer"),
        ("bias_counts", "pointer"),
        ("suppressed_token_ids", "pointer"),
        ("suppressed_counts", "pointer"),
        ("slots", "pointer"),
        ("num_output_tokens", "pointer"),
        ("min_tokens", "pointer"),
        ("repetition_penalty", "pointer"),
        ("presence_penalty", "pointer"),
        ("frequency_penalty", "pointer"),
        ("vocab_size", "int32"),
        ("max_bias", "int32"),
        ("max_suppressed", "int32"),
        ("chunk_size", "int32"),
    ),
)
RESET_SLOT = KernelSpec(
    file="penalties.cu",
    name="reset_slot_kernel",
    template=(),
    parameters=(
        ("token_state", "pointer"),
        ("prompt_token_ids", "pointer"),
        ("output_token_ids", "pointer"),
        ("num_prompt_tokens", "int32"),
        ("num_output_tokens", "int32"),
        ("vocab_size", "int32"),
        ("chunk_size", "int32"),
    ),
)
RECORD_TOKENS = KernelSpec(
    file="penalties.cu",
    name="record_tokens_kernel",
    template=(),
    parameters=(
        ("token_state", "pointer"),
        ("slots", "pointer"),
        ("token_ids", "pointer"),
        ("num_rows", "int32"),
        ("num_slots", "int32"),
        ("vocab_size", "int32"),
    ),
)
APPLY_TOKEN_MASK = KernelSpec(
    file="token_mask.cu",
    name="apply_token_mask_kernel",
    template=(),
    parameters=(
        ("logits", "pointer"),
        ("words", "pointer"),
        ("rows", "pointer"),
        ("vocab_size", "int32"),
        ("chunk_size", "int32"),
    ),
)
ROW_MAXIMUM = KernelSpec(
    file="sampling.cu",
    name="row_maximum_kernel",
    template=(),
    parameters=(
        ("logits", "pointer"),
        ("slots", "pointer"),
        ("maxima", "pointer"),
        ("vocab_size", "int32"),
        ("chunk_size", "int32"),
    ),
)
TOKEN_FILTER = KernelSpec(
    file="token_filter.cu",
    name="token_filter_kernel",
    template=(),
    parameters=(
        ("logits", "pointer"),
        ("slots", "pointer"),
        ("maxima", "pointer"),
        ("temperature", "pointer"),
        ("top_k", "pointer"),
        ("top_p", "pointer"),
        ("min_p", "pointer"),
        ("cutoffs", "pointer"),
        ("vocab_size", "int32"),
        ("num_splits", "int32"),
    ),
)
GUMBEL_CHOICE = KernelSpec(
    file="sampling.cu",
    name="gumbel_choice_kernel",
    template=(),
    parameters=(
        ("logits", "pointer"),
        ("slots", "pointer"),
        ("maxima", "pointer"),
        ("cutoffs", "pointer"),
        ("temperature", "pointer"),
        ("seeds", "pointer"),
        ("positions", "pointer"),
        ("choices", "pointer"),
        ("vocab_size", "int32"),
        ("chunk_size", "int32"),
    ),
)
PICK_TOKEN = KernelSpec(
    file="sampling.cu",
    name="pick_token_kernel",
    template=(),
    parameters=(
        ("slots", "pointer"),
        ("maxima", "pointer"),
        ("choices", "pointer"),
        ("temperature", "pointer"),
        ("token_ids", "pointer"),
        ("num_rows", "int32"),
        ("num_splits", "int32"),
    ),
)
TOP_LOGPROBS = KernelSpec(
    file="logprobs.cu",
    name="top_logprobs_kernel",
    template=(),
    parameters=(
        ("logits", "pointer"),
        ("token_ids", "pointer"),
        ("chosen", "pointer"),
        ("rank", "pointer"),
        ("top_ids", "pointer"),
        ("top_logprobs", "pointer"),
        ("vocab_size", "int32"),
        ("num_top", "int32"),
    ),
)
SPECS = (
    ADJUST_LOGITS,
    RESET_SLOT,
    RECORD_TOKENS,
    APPLY_TOKEN_MASK,
    ROW_MAXIMUM,
    TOKEN_FILTER,
    GUMBEL_CHOICE,
    PICK_TOKEN,
    TOP_LOGPROBS,
)

# As in the kernels.
SPLIT_BLOCK = 256
ROW_BLOCK = 1024
RANDOM_GROUP = 4

SMALLEST_CHUNK = 4096
MAX_SPLITS = 64
ENOUGH_BLOCKS = 1024  # to keep any GPU busy


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch; logits are float32 whatever the dtype of the model."""
    return [(spec, ()) for spec in SPECS]


class VocabSplit(NamedTuple):
    """How each row of a batch is spread over blocks: `num_splits` chunks of `chunk_size` ids, the last shorter."""

    num_splits: int
    chunk_size: int


def split_vocab(rows: int, vocab_size: int) -> VocabSplit:
    """Enough blocks for the device, unless chunks became too small to be worth a block."""
    wanted = min(ceil_div(ENOUGH_BLOCKS, rows), ceil_div(vocab_size, SMALLEST_CHUNK), MAX_SPLITS)
    chunk_size = ceil_div(ceil_div(vocab_size, wanted), RANDOM_GROUP) * RANDOM_GROUP
    return VocabSplit(ceil_div(vocab_size, chunk_size), chunk_size)


def split_config(rows: int, split: VocabSplit) -> LaunchConfig:
    """One block a chunk of a row."""
    return LaunchConfig((split.num_splits, rows, 1), (SPLIT_BLOCK, 1, 1))


def row_block_config(rows: int) -> LaunchConfig:
    """One large block a row."""
    return LaunchConfig((rows, 1, 1), (ROW_BLOCK, 1, 1))


def row_warp_config(rows: int) -> LaunchConfig:
    """One warp a row."""
    return LaunchConfig((ceil_div(rows * WARP_SIZE, SPLIT_BLOCK), 1, 1), (SPLIT_BLOCK, 1, 1))


def row_thread_config(rows: int) -> LaunchConfig:
    """One thread a row."""
    return LaunchConfig((ceil_div(rows, SPLIT_BLOCK), 1, 1), (SPLIT_BLOCK, 1, 1))


class SamplingOps(Ops):
    device: CudaDevice

    def _reset_slot(self, state: SamplingState, slot: int, prompt: Tensor, output: Tensor) -> None:
        token_state = state.token_state[slot]
        (vocab_size,) = token_state.shape
        split = split_vocab(1, vocab_size)
        self.device.launch(
            RESET_SLOT,
            (),
            split_config(1, split),
            token_state,
            prompt,
            output,
            prompt.size,
            output.size,
            vocab_size,
            split.chunk_size,
        )

    def _adjust_logits(self, logits: Tensor, state: SamplingState, metadata: SamplingMetadata) -> None:
        rows, vocab_size = logits.shape
        split = split_vocab(rows, vocab_size)
        self.device.launch(
            ADJUST_LOGITS,
            (),
            split_config(rows, split),
            logits,
            state.token_state,
            state.bias_token_ids,
            state.bias_values,
            state.bias_counts,
            state.suppressed_token_ids,
            state.suppressed_counts,
            metadata.slots,
            metadata.num_output_tokens,
            metadata.min_tokens,
            metadata.repetition_penalty,
            metadata.presence_penalty,
            metadata.frequency_penalty,
            vocab_size,
            state.bias_token_ids.shape[1],
            state.suppressed_token_ids.shape[1],
            split.chunk_size,
        )

    def _apply_token_mask(self, logits: Tensor, words: Tensor, rows: Tensor) -> None:
        vocab_size = logits.shape[1]
        split = split_vocab(rows.size, vocab_size)
        self.device.launch(
            APPLY_TOKEN_MASK, (), split_config(rows.size, split), logits, words, rows, vocab_size, split.chunk_size
        )

    def _sample(self, logits: Tensor, metadata: SamplingMetadata, filtered: bool, out: Tensor) -> None:
        rows, vocab_size = logits.shape
        split = split_vocab(rows, vocab_size)
        slots, temperature = metadata.slots, metadata.temperature
        maxima = empty((rows, split.num_splits), uint64, self.device)
        choices = empty((rows, split.num_splits), uint64, self.device)
        cutoffs = empty((rows,), uint32, self.device) if filtered else None
        chunked = split_config(rows, split)

        self.device.launch(ROW_MAXIMUM, (), chunked, logits, slots, maxima, vocab_size, split.chunk_size)
        if filtered:
            self.device.launch(
                TOKEN_FILTER,
                (),
                row_block_config(rows),
                logits,
                slots,
                maxima,
                temperature,
                metadata.top_k,
                metadata.top_p,
                metadata.min_p,
                cutoffs,
                vocab_size,
                split.num_splits,
            )
        self.device.launch(
            GUMBEL_CHOICE,
            (),
            chunked,
            logits,
            slots,
            maxima,
            cutoffs,
            temperature,
            metadata.seeds,
            metadata.positions,
            choices,
            vocab_size,
            split.chunk_size,
        )
        self.device.launch(
            PICK_TOKEN, (), row_warp_config(rows), slots, maxima, choices, temperature, out, rows, split.num_splits
        )

    def _record_tokens(self, state: SamplingState, slots: Tensor, token_ids: Tensor) -> None:
        num_slots, vocab_size = state.token_state.shape
        config = row_thread_config(slots.size)
        self.device.launch(
            RECORD_TOKENS, (), config, state.token_state, slots, token_ids, slots.size, num_slots, vocab_size
        )

    def _top_logprobs(
        self, logits: Tensor, token_ids: Tensor, chosen: Tensor, rank: Tensor, top_ids: Tensor, top_values: Tensor
    ) -> None:
        rows, vocab_size = logits.shape
        config = row_block_config(rows)
        num_top = top_ids.shape[1]
        self.device.launch(
            TOP_LOGPROBS, (), config, logits, token_ids, chosen, rank, top_ids, top_values, vocab_size, num_top
        )
