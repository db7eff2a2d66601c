"""Penalties, masks, filters, choice of tokens and log-probabilities, all on logits in float32."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from tessera.engine.contract.sampling_params import RowFlag
from tessera.engine.contract.sampling_row import ROW_ALIGNMENT, SAMPLING_ROW
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, c_enum, c_struct, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InInt, Int32, InUint, OutFloat, OutInt, OutUint, Pointer
from tessera.engine.ops.cuda.types import ceil_div
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.sampling_interface import RANDOM_GROUP, SamplingState
from tessera.engine.tensor import Tensor, uint32, uint64

InRows = Annotated[Pointer, "const SamplingRow*"]


class AdjustLogitsParams(NamedTuple):
    logits: OutFloat
    token_state: InUint
    bias_token_ids: InInt
    bias_values: InFloat
    bias_counts: InInt
    suppressed_token_ids: InInt
    suppressed_counts: InInt
    rows: InRows
    vocab_size: Int32
    max_bias: Int32
    max_suppressed: Int32
    chunk_size: Int32


class ResetSlotParams(NamedTuple):
    token_state: OutUint
    prompt_token_ids: InInt
    output_token_ids: InInt
    num_prompt_tokens: Int32
    num_output_tokens: Int32
    vocab_size: Int32
    chunk_size: Int32


class RecordTokensParams(NamedTuple):
    token_state: OutUint
    slots: InInt
    token_ids: InInt
    num_rows: Int32
    num_slots: Int32
    vocab_size: Int32


class ApplyTokenMaskParams(NamedTuple):
    logits: OutFloat
    words: InUint
    rows: InInt
    vocab_size: Int32
    chunk_size: Int32


class SampleParams(NamedTuple):
    logits: InFloat
    rows: InRows
    token_ids: OutInt
    vocab_size: Int32


class TopLogprobsParams(NamedTuple):
    logits: InFloat
    token_ids: InInt
    chosen: OutFloat
    rank: OutInt
    top_ids: OutInt
    top_logprobs: OutFloat
    vocab_size: Int32
    num_top: Int32


ADJUST_LOGITS = KernelSpec(
    file="sampling/penalties.cu",
    name="adjust_logits_kernel",
    template=(),
    params=AdjustLogitsParams,
    overlaps=True,
)
RESET_SLOT = KernelSpec(
    file="sampling/penalties.cu",
    name="reset_slot_kernel",
    template=(),
    params=ResetSlotParams,
)
RECORD_TOKENS = KernelSpec(
    file="sampling/penalties.cu",
    name="record_tokens_kernel",
    template=(),
    params=RecordTokensParams,
    overlaps=True,
)
APPLY_TOKEN_MASK = KernelSpec(
    file="sampling/token_mask.cu",
    name="apply_token_mask_kernel",
    template=(),
    params=ApplyTokenMaskParams,
    overlaps=True,
)
SAMPLE = KernelSpec(
    file="sampling/sampling.cu",
    name="sample_kernel",
    template=("FILTERED",),
    params=SampleParams,
    overlaps=True,
)
SAMPLE_CLUSTER = KernelSpec(
    file="sampling/sampling.cu",
    name="sample_cluster_kernel",
    template=("FILTERED",),
    params=SampleParams,
    min_arch=90,
    overlaps=True,
)
TOP_LOGPROBS = KernelSpec(
    file="sampling/logprobs.cu", name="top_logprobs_kernel", template=(), params=TopLogprobsParams
)
TOP_LOGPROBS_CLUSTER = KernelSpec(
    file="sampling/logprobs.cu",
    name="top_logprobs_cluster_kernel",
    template=(),
    params=TopLogprobsParams,
    min_arch=90,
    overlaps=True,
)
SPECS = (
    ADJUST_LOGITS,
    RESET_SLOT,
    RECORD_TOKENS,
    APPLY_TOKEN_MASK,
    SAMPLE,
    SAMPLE_CLUSTER,
    TOP_LOGPROBS,
    TOP_LOGPROBS_CLUSTER,
)

SPLIT_BLOCK = Constant(256, "threads of a block that takes a part of a row")
ROW_BLOCK = Constant(1024, "threads of a block that takes a row")
GROUP = Constant(RANDOM_GROUP, "ids that share one call of the random generator")
CLUSTER_BLOCKS = Constant(8)
CLUSTER_THREADS = Constant(512, "of a block of a cluster")
MAX_CLUSTER_TOP = Constant(64)
declare_header(
    "sampling_row",
    __name__,
    declarations=c_enum("RowFlag", RowFlag) + c_struct("SamplingRow", SAMPLING_ROW, ROW_ALIGNMENT),
)
declare_header(
    "penalties", __name__, {"BLOCK_SIZE": SPLIT_BLOCK}, (AdjustLogitsParams, ResetSlotParams, RecordTokensParams)
)
declare_header("token_mask", __name__, {"BLOCK_SIZE": SPLIT_BLOCK}, (ApplyTokenMaskParams,))
declare_header(
    "sampling",
    __name__,
    {
        "THREADS": ROW_BLOCK,
        "CLUSTER_BLOCKS": CLUSTER_BLOCKS,
        "CLUSTER_THREADS": CLUSTER_THREADS,
    },
    (SampleParams,),
)
declare_header("row_choice", __name__, {"GROUP": GROUP})
declare_header(
    "logprobs",
    __name__,
    {
        "BLOCK_SIZE": ROW_BLOCK,
        "CLUSTER_BLOCKS": CLUSTER_BLOCKS,
        "CLUSTER_THREADS": CLUSTER_THREADS,
        "MAX_CLUSTER_TOP": MAX_CLUSTER_TOP,
    },
    (TopLogprobsParams,),
)

MOST_TOGETHER = 2  # blocks on a multiprocessor that are kept from getting a third
LOGPROBS_STATIC_BYTES = 10 << 10
SAMPLE_STATIC_BYTES = 22 << 10  # of shared memory that the kernel itself declares, rounded up

SMALLEST_CHUNK = 4096
MAX_SPLITS = 64
ENOUGH_BLOCKS = 1024  # to keep any GPU busy


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch; logits are float32 whatever the dtype of the model."""
    pairs: list[Instantiation] = []
    for spec in SPECS:
        pairs += [(spec, (filtered,)) for filtered in ("false", "true")] if spec.template else [(spec, ())]
    return pairs


class VocabSplit(NamedTuple):
    """A row's split over blocks: `num_splits` chunks of `chunk_size` ids, the last shorter."""

    num_splits: int
    chunk_size: int


def split_vocab(rows: int, vocab_size: int) -> VocabSplit:
    """Enough blocks to fill the device, of chunks not too small to be worth a block."""
    wanted = min(ceil_div(ENOUGH_BLOCKS, rows), ceil_div(vocab_size, SMALLEST_CHUNK), MAX_SPLITS)
    chunk_size = ceil_div(ceil_div(vocab_size, wanted), RANDOM_GROUP) * RANDOM_GROUP
    return VocabSplit(ceil_div(vocab_size, chunk_size), chunk_size)


def split_config(rows: int, split: VocabSplit) -> LaunchConfig:
    """One block a chunk of a row."""
    return LaunchConfig((split.num_splits, rows, 1), (SPLIT_BLOCK, 1, 1))


def row_block_config(rows: int) -> LaunchConfig:
    """One large block a row."""
    return LaunchConfig((1, rows, 1), (ROW_BLOCK, 1, 1))


def cluster_config(rows: int, vocab_size: int, *, filtered: bool) -> LaunchConfig:
    """A cluster a row; what filters need of its tokens is kept in shared memory."""
    ids_per_block = ceil_div(ceil_div(vocab_size, CLUSTER_BLOCKS), RANDOM_GROUP) * RANDOM_GROUP
    shared_bytes = ids_per_block * uint32.itemsize if filtered else 0
    return LaunchConfig((CLUSTER_BLOCKS, rows, 1), (CLUSTER_THREADS, 1, 1), shared_bytes)


def logprobs_cluster_config(rows: int, vocab_size: int, num_top: int) -> LaunchConfig:
    """A cluster a row; all ids of `num_top` threads may be candidates."""
    ids_per_thread = ceil_div(ceil_div(vocab_size, CLUSTER_BLOCKS), CLUSTER_THREADS)
    shared_bytes = num_top * ids_per_thread * uint64.itemsize
    return LaunchConfig((CLUSTER_BLOCKS, rows, 1), (CLUSTER_THREADS, 1, 1), shared_bytes)


@lru_cache(maxsize=1024)
def apart(device: CudaDevice, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> LaunchConfig:
    """A launch of a cluster a row with few blocks to a multiprocessor, if all clusters run at a time even so.

    Otherwise clusters are packed onto some multiprocessors while others idle. Unused shared memory keeps their blocks
    apart.
    """
    rows = config.grid[1]
    for together in range(1, MOST_TOGETHER + 1):
        padded = config._replace(shared_bytes=max(config.shared_bytes, device.max_shared_bytes // (together + 1)))
        if rows <= device.clusters_at_once(spec, template, padded._replace(cluster=CLUSTER_BLOCKS)):
            return padded
    return config


def row_thread_config(rows: int) -> LaunchConfig:
    """One thread a row."""
    return LaunchConfig((ceil_div(rows, SPLIT_BLOCK), 1, 1), (SPLIT_BLOCK, 1, 1))


class SamplingOps(Ops):
    device: CudaDevice

    def _reset_slot(self, state: SamplingState, slot: int, prompt: Tensor, output: Tensor) -> None:
        token_state = state.token_state[slot]
        (vocab_size,) = token_state.shape
        split = split_vocab(1, vocab_size)
        params = ResetSlotParams(
            token_state=token_state,
            prompt_token_ids=prompt,
            output_token_ids=output,
            num_prompt_tokens=prompt.size,
            num_output_tokens=output.size,
            vocab_size=vocab_size,
            chunk_size=split.chunk_size,
        )
        self.device.launch(RESET_SLOT, (), split_config(1, split), params)

    def _adjust_logits(self, logits: Tensor, state: SamplingState, rows: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        split = split_vocab(num_rows, vocab_size)
        params = AdjustLogitsParams(
            logits=logits,
            token_state=state.token_state,
            bias_token_ids=state.bias_token_ids,
            bias_values=state.bias_values,
            bias_counts=state.bias_counts,
            suppressed_token_ids=state.suppressed_token_ids,
            suppressed_counts=state.suppressed_counts,
            rows=rows,
            vocab_size=vocab_size,
            max_bias=state.bias_token_ids.shape[1],
            max_suppressed=state.suppressed_token_ids.shape[1],
            chunk_size=split.chunk_size,
        )
        self.device.launch(ADJUST_LOGITS, (), split_config(num_rows, split), params)

    def _apply_token_mask(self, logits: Tensor, words: Tensor, rows: Tensor) -> None:
        vocab_size = logits.shape[1]
        split = split_vocab(rows.size, vocab_size)
        params = ApplyTokenMaskParams(
            logits=logits, words=words, rows=rows, vocab_size=vocab_size, chunk_size=split.chunk_size
        )
        self.device.launch(APPLY_TOKEN_MASK, (), split_config(rows.size, split), params)

    def _sample(self, logits: Tensor, rows: Tensor, filtered: bool, out: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        spec, config = SAMPLE, row_block_config(num_rows)
        template = ("true" if filtered else "false",)
        if SAMPLE_CLUSTER.supports(self.device.arch):
            in_cluster = cluster_config(num_rows, vocab_size, filtered=filtered)
            if in_cluster.shared_bytes + SAMPLE_STATIC_BYTES <= self.device.max_shared_bytes:
                spec, config = SAMPLE_CLUSTER, apart(self.device, SAMPLE_CLUSTER, template, in_cluster)
        params = SampleParams(logits=logits, rows=rows, token_ids=out, vocab_size=vocab_size)
        self.device.launch(spec, template, config, params)

    def _record_tokens(self, state: SamplingState, slots: Tensor, token_ids: Tensor) -> None:
        num_slots, vocab_size = state.token_state.shape
        config = row_thread_config(slots.size)
        params = RecordTokensParams(
            token_state=state.token_state,
            slots=slots,
            token_ids=token_ids,
            num_rows=slots.size,
            num_slots=num_slots,
            vocab_size=vocab_size,
        )
        self.device.launch(RECORD_TOKENS, (), config, params)

    def _top_logprobs(
        self, logits: Tensor, token_ids: Tensor, chosen: Tensor, rank: Tensor, top_ids: Tensor, top_values: Tensor
    ) -> None:
        rows, vocab_size = logits.shape
        num_top = top_ids.shape[1]
        spec, config = TOP_LOGPROBS, row_block_config(rows)
        if TOP_LOGPROBS_CLUSTER.supports(self.device.arch) and num_top <= MAX_CLUSTER_TOP:
            in_cluster = logprobs_cluster_config(rows, vocab_size, num_top)
            if in_cluster.shared_bytes + LOGPROBS_STATIC_BYTES <= self.device.max_shared_bytes:
                spec = TOP_LOGPROBS_CLUSTER
                config = apart(self.device, spec, (), in_cluster)
        params = TopLogprobsParams(
            logits=logits,
            token_ids=token_ids,
            chosen=chosen,
            rank=rank,
            top_ids=top_ids,
            top_logprobs=top_values,
            vocab_size=vocab_size,
            num_top=num_top,
        )
        self.device.launch(spec, (), config, params)
