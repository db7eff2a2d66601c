"""Kernels by which the ranks that share a model meet in each other's memory, and their parts of choosing tokens."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, c_enum, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import (
    Float32,
    InFloat,
    InInt,
    InT,
    Int32,
    Int64,
    OutFloat,
    OutInt,
    OutT,
    Pointer,
    Uint64,
)
from tessera.engine.ops.cuda.sampling import ROW_BLOCK, InRows, row_block_config
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, CHUNK, NORM_CHUNKS, ceil_div, rmsnorm_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor

MAX_RANKS = Constant(16)
MAX_BLOCKS = Constant(128, "of a grid: all of them are on the device at a time, as they wait for others")
COUNTED_BLOCKS = Constant(512, "of a grid whose blocks count their meetings")
THREADS = Constant(512, "of a block")
POLLS = Constant(256, "of a flag between two looks at the clock")
BRIEF = Constant(1_000_000, "nanoseconds of a wait in which the host is not looked at")
FLAGS = Constant(
    64, "where a box has its flags, in bytes; before them are the epoch, the blocks that ended, and reports begun"
)
ADDRESSES = Constant(FLAGS + 2 * MAX_RANKS * MAX_BLOCKS * 4, "where it has the addresses that it was told")
MEETINGS = Constant(ADDRESSES + 2 * MAX_RANKS * MAX_BLOCKS * 8, "where each block counts its meetings")
MOST_LEFT = 8192  # elements of a row whose sum the next product takes
SUM_COUNTS = Constant(MEETINGS + COUNTED_BLOCKS * 4, "where sums are counted that were taken, and that were sent")
SUM_PACKETS = Constant(SUM_COUNTS + 64, "where the packets of rows are that products send, of both halves of a layer")
ROW_PACKETS = Constant(MOST_LEFT // 2, "of a row and a rank: 8 bytes each, with two elements of 16 bits")
PLACES = Constant(
    SUM_PACKETS + 2 * MAX_RANKS * ROW_PACKETS * 8,
    "where a box has the places of meetings with even numbers, then odd ones",
)
BLOCK_SUMMANDS = Constant(THREADS * CHUNK * 4, "bytes of a block and a rank")
PACKETS = Constant(COUNTED_BLOCKS * BLOCK_SUMMANDS, "where packets are in a rank's places, behind the summands")
PLACES_BYTES = Constant(PACKETS + MAX_BLOCKS * THREADS * 16, "of a rank in a meeting")
EMPTY = Constant(0x80000000, "a word that has not come")
SUMMING_BLOCKS = Constant(2, "of a sum in one shot, that have room on a multiprocessor")
PART_CHUNKS = Constant(2, "of a thread, of a sum in two shots, that are on their way at once")
# Elements of a sum in one shot with the norm among more than two ranks: 2 MB in 16 bits. Beyond, two shots and the
# norm's kernel take less.
MOST_NORMED = 1 << 20
SUMMED_THREADS = Constant(BLOCK_SUMMANDS // (2 * CHUNK * NORM_CHUNKS), "of a row that is sent, at most")
LARGEST_ID = Constant(int(np.iinfo(np.int32).max))


class Meeting(IntEnum):
    """The kernels in which ranks meet."""

    ALL_REDUCE = 0
    ALL_REDUCE_PARTS = 1
    GATHER_COLUMNS = 2
    BROADCAST = 3
    ALL_REDUCE_NORM = 4
    ALL_REDUCE_MAX = 5
    MATMUL_OF_RANKS = 6


class Board(IntEnum):
    """Words of a rank's board in the host's memory, where its kernels report what they waited for in vain."""

    STOP = 0  # set by the host: kernels that wait end
    LATE = 1  # there is a report
    KIND = 2  # a Meeting
    OTHER = 3  # the rank that did not come
    PHASE = 4  # of the meeting: 0 where it begins, 1 where it ends
    BLOCK = 5
    WANTED = 6  # the number of the meeting
    SEEN = 7  # that which the other rank has come to


InChoices = Annotated[Pointer, "const unsigned long long*"]
OutChoices = Annotated[Pointer, "unsigned long long*"]
Boxes = Annotated[Pointer, "const unsigned long long*"]  # of each rank, then this rank's board


class AllReduceParams(NamedTuple):
    x: OutT
    residual: OutT
    boxes: Boxes
    size: Int64
    rank: Int32
    ranks: Int32
    patience: Uint64


class AllReducePartsParams(NamedTuple):
    x: OutT
    residual: OutT
    boxes: Boxes
    size: Int64
    rank: Int32
    ranks: Int32
    patience: Uint64


class AllReduceNormParams(NamedTuple):
    x: OutT
    residual: OutT
    weight: InT
    normed: OutT
    boxes: Boxes
    rows: Int32
    hidden: Int32
    eps: Float32
    rank: Int32
    ranks: Int32
    patience: Uint64


class GatherColumnsParams(NamedTuple):
    x: InFloat
    out: OutFloat
    boxes: Boxes
    rows: Int32
    width: Int32
    whole: Int32
    first: Int32
    rank: Int32
    ranks: Int32
    patience: Uint64


class BroadcastParams(NamedTuple):
    x: OutInt
    boxes: Boxes
    size: Int32
    rank: Int32
    ranks: Int32
    patience: Uint64


class AllReduceMaxParams(NamedTuple):
    x: Annotated[Pointer, "unsigned long long*"]
    boxes: Boxes
    size: Int32
    rank: Int32
    ranks: Int32
    patience: Uint64


class OwnIdsParams(NamedTuple):
    ids: InInt
    sampled: InInt
    out: OutInt
    size: Int32
    first: Int32


class SliceBestParams(NamedTuple):
    logits: InFloat
    rows: InRows
    choices: OutChoices
    width: Int32
    first: Int32


class SliceChoiceParams(NamedTuple):
    logits: InFloat
    rows: InRows
    maxima: InChoices
    choices: OutChoices
    width: Int32
    first: Int32


class SliceTokensParams(NamedTuple):
    maxima: InChoices
    choices: InChoices
    token_ids: OutInt
    num_rows: Int32


ALL_REDUCE = KernelSpec(
    "collectives/all_reduce.cu",
    "all_reduce_kernel",
    ("T", "ADDS", "PIECES"),
    AllReduceParams,
    overlaps=True,
    on_demand=True,
)
ALL_REDUCE_PARTS = KernelSpec(
    "collectives/all_reduce.cu",
    "all_reduce_parts_kernel",
    ("T", "ADDS"),
    AllReducePartsParams,
    overlaps=True,
    on_demand=True,
)
ALL_REDUCE_NORM = KernelSpec(
    "collectives/all_reduce_norm.cu",
    "all_reduce_norm_kernel",
    ("T", "ONCE"),
    AllReduceNormParams,
    overlaps=True,
    on_demand=True,
)
GATHER_COLUMNS = KernelSpec("collectives/exchange.cu", "gather_columns_kernel", (), GatherColumnsParams, on_demand=True)
BROADCAST = KernelSpec("collectives/exchange.cu", "broadcast_kernel", (), BroadcastParams, on_demand=True)
ALL_REDUCE_MAX = KernelSpec(
    "collectives/exchange.cu", "all_reduce_max_kernel", (), AllReduceMaxParams, overlaps=True, on_demand=True
)
OWN_IDS = KernelSpec("collectives/exchange.cu", "own_ids_kernel", (), OwnIdsParams, overlaps=True, on_demand=True)
SLICE_BEST = KernelSpec("sampling/slice.cu", "slice_best_kernel", (), SliceBestParams, overlaps=True, on_demand=True)
SLICE_CHOICE = KernelSpec(
    "sampling/slice.cu", "slice_choice_kernel", (), SliceChoiceParams, overlaps=True, on_demand=True
)
SLICE_TOKENS = KernelSpec(
    "sampling/slice.cu", "slice_tokens_kernel", (), SliceTokensParams, overlaps=True, on_demand=True
)
SPECS = (
    ALL_REDUCE,
    ALL_REDUCE_PARTS,
    ALL_REDUCE_NORM,
    GATHER_COLUMNS,
    BROADCAST,
    ALL_REDUCE_MAX,
    OWN_IDS,
    SLICE_BEST,
    SLICE_CHOICE,
    SLICE_TOKENS,
)
declare_header(
    "peers",
    __name__,
    {
        "MAX_RANKS": MAX_RANKS,
        "MAX_BLOCKS": MAX_BLOCKS,
        "POLLS": POLLS,
        "BRIEF": BRIEF,
        "FLAGS": FLAGS,
        "ADDRESSES": ADDRESSES,
        "MEETINGS": MEETINGS,
        "SUM_COUNTS": SUM_COUNTS,
        "SUM_PACKETS": SUM_PACKETS,
        "ROW_PACKETS": ROW_PACKETS,
        "PLACES": PLACES,
        "PLACES_BYTES": PLACES_BYTES,
        "BLOCK_SUMMANDS": BLOCK_SUMMANDS,
        "PACKETS": PACKETS,
        "EMPTY": EMPTY,
        "LARGEST_ID": LARGEST_ID,
    },
    declarations=c_enum("Meeting", Meeting) + c_enum("Board", Board),
)
declare_header(
    "all_reduce",
    __name__,
    {"THREADS": THREADS, "PART_CHUNKS": PART_CHUNKS, "SUMMING_BLOCKS": SUMMING_BLOCKS},
    params=(AllReduceParams, AllReducePartsParams),
)
declare_header(
    "all_reduce_norm",
    __name__,
    {"MAX_THREADS": SUMMED_THREADS, "ROW_CHUNKS": NORM_CHUNKS, "SUMMING_BLOCKS": SUMMING_BLOCKS},
    (AllReduceNormParams,),
)
declare_header(
    "exchange",
    __name__,
    {"THREADS": THREADS},
    params=(GatherColumnsParams, BroadcastParams, AllReduceMaxParams, OwnIdsParams),
)

declare_header("slice", __name__, {"THREADS": ROW_BLOCK}, (SliceBestParams, SliceChoiceParams, SliceTokensParams))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that ranks launch for activations of these C types."""
    found: list[Instantiation] = []
    for dtype, name in C_TYPE_NAMES.items():
        if name not in dtypes:
            continue
        for adds in ("false", "true"):
            numbers = sorted({1, most_pieces(dtype.itemsize)})
            found += [(ALL_REDUCE, (name, adds, str(pieces))) for pieces in numbers]
            found.append((ALL_REDUCE_PARTS, (name, adds)))
    found += [(ALL_REDUCE_NORM, (dtype, once)) for dtype in dtypes for once in ("false", "true")]
    return [
        *found,
        (GATHER_COLUMNS, ()),
        (BROADCAST, ()),
        (ALL_REDUCE_MAX, ()),
        (OWN_IDS, ()),
        *((spec, ()) for spec in (SLICE_BEST, SLICE_CHOICE, SLICE_TOKENS)),
    ]


def empty_box(ranks: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """What the box of a rank among so many begins with."""
    words = np.zeros((PLACES + 2 * ranks * PLACES_BYTES) // 4, np.uint32)
    words[PLACES // 4 :].reshape(2 * ranks, PLACES_BYTES // 4)[:, : PACKETS // 4] = EMPTY
    return words


def most_at_once(ranks: int) -> int:
    """Elements of a sum in one shot among more than two ranks: each sends all of them to every other. Between two it is
    always one, as two would move as much."""
    return MAX_BLOCKS * THREADS * CHUNK // (ranks - 1)


def rows_fit(rows: int, hidden: int, itemsize: int, ranks: int) -> bool:
    """Whether rows before a norm are sent in one shot."""
    return (ranks == 2 or rows * hidden <= MOST_NORMED // (ranks - 1)) and hidden * itemsize <= BLOCK_SUMMANDS


def meeting_config(size: int, per_thread: int = 1, most_blocks: int = MAX_BLOCKS) -> LaunchConfig:
    """Of a kernel in which blocks wait for those of other ranks."""
    blocks = min(max(ceil_div(size, THREADS * per_thread), 1), most_blocks)
    return LaunchConfig((blocks, 1, 1), (THREADS, 1, 1))


def most_pieces(itemsize: int) -> int:
    """Chunks of a thread that a place has room for."""
    return BLOCK_SUMMANDS // (THREADS * CHUNK * itemsize)


def sum_config(size: int, itemsize: int, multiprocessors: int) -> tuple[LaunchConfig, int]:
    """Of a sum in one shot, and the pieces of a thread; blocks meet equally often."""
    most = min(COUNTED_BLOCKS, SUMMING_BLOCKS * multiprocessors)
    pieces = 1 if size <= most * THREADS * CHUNK else most_pieces(itemsize)
    units = max(ceil_div(size, THREADS * CHUNK * pieces), 1)
    blocks = ceil_div(units, ceil_div(units, most))
    return LaunchConfig((blocks, 1, 1), (THREADS, 1, 1)), pieces


def norm_config(
    rows: int, hidden: int, ranks: int, itemsize: int, multiprocessors: int
) -> tuple[LaunchConfig, bool] | None:
    """Of a sum with a norm, which adds in the order of `rmsnorm_kernel`, and whether a block has one row alone; None
    for what places have no room for."""
    threads = rmsnorm_config(rows, hidden).block[0]
    fits = hidden <= threads * CHUNK * NORM_CHUNKS and threads <= SUMMED_THREADS and hidden % CHUNK == 0
    if not fits or not rows_fit(rows, hidden, itemsize, ranks):
        return None
    # Room on a multiprocessor: for two blocks that take many registers, or one of the largest; twice as many of others.
    once = rows <= min(COUNTED_BLOCKS, multiprocessors * (2 if 2 * threads <= SUMMED_THREADS else 1))
    most = min(COUNTED_BLOCKS, multiprocessors * (SUMMING_BLOCKS * SUMMED_THREADS // threads))
    blocks = rows if once else ceil_div(rows, ceil_div(rows, most))
    return LaunchConfig((blocks, 1, 1), (threads, 1, 1)), once


def launch_own_ids(device: CudaDevice, ids: Tensor, sampled: Tensor | None, first: int, out: Tensor) -> None:
    """See `Collectives.own_ids`."""
    config = LaunchConfig((ceil_div(ids.size, THREADS), 1, 1), (THREADS, 1, 1))
    device.launch(OWN_IDS, (), config, OwnIdsParams(ids, sampled, out, ids.size, first))


class SliceOps(Ops):
    device: CudaDevice

    def _best_of_slice(self, logits: Tensor, rows: Tensor, first: int, out: Tensor) -> None:
        num_rows, width = logits.shape
        params = SliceBestParams(logits=logits, rows=rows, choices=out, width=width, first=first)
        self.device.launch(SLICE_BEST, (), row_block_config(num_rows), params)

    def _choose_in_slice(self, logits: Tensor, rows: Tensor, maxima: Tensor, first: int, out: Tensor) -> None:
        num_rows, width = logits.shape
        params = SliceChoiceParams(logits=logits, rows=rows, maxima=maxima, choices=out, width=width, first=first)
        self.device.launch(SLICE_CHOICE, (), row_block_config(num_rows), params)

    def _slice_tokens(self, maxima: Tensor, choices: Tensor, out: Tensor) -> None:
        config = LaunchConfig((ceil_div(out.size, ROW_BLOCK), 1, 1), (ROW_BLOCK, 1, 1))
        params = SliceTokensParams(maxima=maxima, choices=choices, token_ids=out, num_rows=out.size)
        self.device.launch(SLICE_TOKENS, (), config, params)
