"""Products of few rows by experts' weights.

A row's result depends neither on the other rows nor on their number: every sum runs over the same eight interleaved
parts of k in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InInt, InT, Int32, OutT
from tessera.engine.ops.cuda.linear.decode import SEGMENT_BYTES, THREADS, UNIT, WARPS
from tessera.engine.ops.cuda.moe.experts import ACTIVATIONS, CLAMPED_SWIGLU, NONE, SILU, ExpertOperands
from tessera.engine.ops.cuda.types import HALF_BYTES, WARP_SIZE, aligned, ceil_div, cuda_type


class ExpertDecodeParams(NamedTuple):
    x: InT
    weight: InT
    bias: InT
    offsets: InInt
    pairs: InInt
    out: OutT
    num_experts: Int32
    out_features: Int32
    in_features: Int32
    x_stride: Int32
    top_k: Int32
    activation: Int32
    settled: Int32


EXPERT_DECODE = KernelSpec(
    file="moe/expert_decode.cu",
    name="expert_decode_kernel",
    template=("T", "TOKENS", "UNITS", "STAGES"),
    params=ExpertDecodeParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (EXPERT_DECODE,)
declare_header(
    "expert_decode",
    __name__,
    {"EXPERT_NONE": NONE, "EXPERT_SILU": SILU, "EXPERT_CLAMPED_SWIGLU": CLAMPED_SWIGLU},
    (ExpertDecodeParams,),
)

STATIC_BYTES = 5 * 1024  # of a block's shared memory, at most
RESERVED_BYTES = 1024  # of a multiprocessor's shared memory, for each block
BLOCKS_A_MULTIPROCESSOR = 2
MOST_ROWS = 8  # of an expert on average
# A second block on each multiprocessor hides what the first waits for between tiles. With fewer tiles its place is
# better for a block of the kernel behind, which then copies its weights while this one ends.
TILES_FOR_TWO_BLOCKS = 16  # of a multiprocessor, at most


@dataclass(frozen=True)
class ExpertDecodeTile:
    """A variant of the kernel: the most rows of x, units of 8 weight rows at a time, stages of the ring."""

    tokens: int
    units: int
    stages: int

    def template(self, dtype: str) -> tuple[str, ...]:
        return (dtype, str(self.tokens), str(self.units), str(self.stages))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        groups = ceil_div(self.tokens, 8)
        ring = self.stages * (self.units + groups) * THREADS * SEGMENT_BYTES
        return ring + WARPS * self.units * groups * WARP_SIZE * 8


TILES = (ExpertDecodeTile(8, 4, 5), ExpertDecodeTile(8, 4, 4), ExpertDecodeTile(16, 4, 3))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(EXPERT_DECODE, tile.template(dtype)) for dtype in dtypes if dtype != "float" for tile in TILES]


def choose_tile(num_pairs: int, num_experts: int, shared_limit: int) -> ExpertDecodeTile | None:
    """For tiles of 16 rows where experts have more than 4 each on average; None where none fits.

    The one of which a multiprocessor has room for two blocks, if there is any.
    """
    if num_pairs > MOST_ROWS * num_experts:
        return None
    tokens = 8 if num_pairs <= 4 * num_experts else 16
    sizes = [(tile, tile.shared_bytes + STATIC_BYTES) for tile in TILES if tile.tokens == tokens]
    fitting = [(tile, size) for tile, size in sizes if size <= shared_limit]
    twice = (tile for tile, size in fitting if _fit_twice(size, shared_limit))
    return next(twice, fitting[0][0] if fitting else None)


def _fit_twice(size: int, shared_limit: int) -> bool:
    """Whether a multiprocessor has room for two such blocks; one may use all of it but what is reserved."""
    return BLOCKS_A_MULTIPROCESSOR * (size + RESERVED_BYTES) <= shared_limit + RESERVED_BYTES


def can_do(operands: ExpertOperands) -> bool:
    if operands.x.dtype.itemsize != HALF_BYTES or operands.activation not in ACTIVATIONS:
        return False
    features = operands.out.shape[1]
    in_segments = operands.in_features % 8 == 0 and features % 2 == 0
    return in_segments and aligned(16, operands.x, operands.weight) and aligned(4, operands.out, operands.bias)


def launch(device: CudaDevice, operands: ExpertOperands, *, settled: bool = False) -> bool:
    """Submit the product with its activation; False, and nothing done, where the kernel cannot.

    `settled`: the routing was complete before the kernel in front began. It is for all that is launched afterwards.
    """
    tile = choose_tile(operands.num_pairs, operands.num_experts, device.max_shared_bytes)
    if tile is None or not can_do(operands):
        return False
    one_row = operands.gathers and operands.x.shape[0] == 1
    params = ExpertDecodeParams(
        x=operands.x,
        weight=operands.weight,
        bias=operands.bias,
        offsets=operands.routed.offsets,
        pairs=None if one_row else operands.pairs,
        out=operands.out,
        num_experts=operands.num_experts,
        out_features=operands.out_features,
        in_features=operands.in_features,
        x_stride=0 if one_row else operands.in_features,
        top_k=operands.top_k,
        activation=ACTIVATIONS[operands.activation],
        settled=settled,
    )
    columns = ceil_div(operands.out_features, UNIT * tile.units)
    most = columns * min(operands.num_pairs, operands.num_experts + operands.num_pairs // tile.tokens)
    two = most >= TILES_FOR_TWO_BLOCKS * device.multiprocessors
    two = two and _fit_twice(tile.shared_bytes + STATIC_BYTES, device.max_shared_bytes)
    blocks = device.multiprocessors * (BLOCKS_A_MULTIPROCESSOR if two else 1)
    config = LaunchConfig((min(most, blocks), 1, 1), (THREADS, 1, 1), tile.shared_bytes)
    device.launch(EXPERT_DECODE, tile.template(cuda_type(operands.x.dtype)), config, params)
    return True
