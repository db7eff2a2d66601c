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
from tessera.engine.ops.cuda.linear.decode import SEGMENT_BYTES, THREADS, UNIT, WARPS, Limits
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
MOST_ROWS = 8  # of an expert on average
# From as many tiles of a multiprocessor on, a second block on each hides what the first waits for between tiles. With
# fewer its place is better for a block of the kernel behind, which then copies its weights while this one ends.
TILES_FOR_TWO_BLOCKS = 16


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


UNITS = 4
# Stages by tokens: where two blocks share a multiprocessor; where it has one, so large that no two of a kernel meet on
# a multiprocessor while another idles; and what has room beside that.
STAGES_OF_TWO = {8: 5, 16: 3}
STAGES_OF_ONE = {8: 6, 16: 4}
STAGES_BEHIND_ONE = {8: 4, 16: 3}
TILES = tuple(
    ExpertDecodeTile(tokens, UNITS, count)
    for tokens in STAGES_OF_TWO
    for count in sorted({stages[tokens] for stages in (STAGES_OF_TWO, STAGES_OF_ONE, STAGES_BEHIND_ONE)}, reverse=True)
)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(EXPERT_DECODE, tile.template(dtype)) for dtype in dtypes if dtype != "float" for tile in TILES]


def choose_tile(
    num_pairs: int, num_experts: int, columns: int, limits: Limits, *, behind: bool
) -> tuple[ExpertDecodeTile, int] | None:
    """The variant, and the number of blocks; None where none fits. Tiles of 16 rows where experts have more than 4
    each on average.

    Args:
        columns: tiles of columns of an expert.
        behind: it begins while another of these products runs.
    """
    if num_pairs > MOST_ROWS * num_experts:
        return None
    tokens = 8 if num_pairs <= 4 * num_experts else 16
    most = columns * min(num_pairs, num_experts + num_pairs // tokens)  # tiles
    two = ExpertDecodeTile(tokens, UNITS, STAGES_OF_TWO[tokens])
    reserved = 2 * (two.shared_bytes + STATIC_BYTES + RESERVED_BYTES)
    if most >= TILES_FOR_TWO_BLOCKS * limits.multiprocessors and reserved <= limits.shared_bytes + RESERVED_BYTES:
        return two, min(most, 2 * limits.multiprocessors)
    wanted = (STAGES_BEHIND_ONE if behind else STAGES_OF_ONE)[tokens]
    fitting = [
        tile
        for tile in TILES
        if tile.tokens == tokens and tile.stages <= wanted and tile.shared_bytes + STATIC_BYTES <= limits.shared_bytes
    ]
    return (fitting[0], min(most, limits.multiprocessors)) if fitting else None


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
    columns = ceil_div(operands.out_features, UNIT * UNITS)
    limits = Limits(device.multiprocessors, device.max_shared_bytes)
    chosen = choose_tile(operands.num_pairs, operands.num_experts, columns, limits, behind=settled)
    if chosen is None or not can_do(operands):
        return False
    tile, blocks = chosen
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
    config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), tile.shared_bytes)
    device.launch(EXPERT_DECODE, tile.template(cuda_type(operands.x.dtype)), config, params)
    return True
