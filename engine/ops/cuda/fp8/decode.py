"""Products of up to 16 e4m3 rows: which variant of `fp8_decode_kernel` runs.

A row's result does not depend on the other rows, nor on their number: every sum runs over the same eight interleaved
parts of k in the same order. (A single row is quantised by the kernel itself, with a norm of which the last bit may
differ.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InT, Int32, OutOut, Pointer
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.fp8.problem import FP8_LINEAR, GROUP, Fp8Operands, Fp8Problem, format_of
from tessera.engine.ops.cuda.linear.decode import THREADS, UNIT, WARPS, cost_of_row
from tessera.engine.ops.cuda.neighbours import asked_bytes, most_bytes
from tessera.engine.ops.cuda.types import HALF_BYTES, ceil_div
from tessera.engine.tensor import float32

InBytes = Annotated[Pointer, "const unsigned char*"]


class Fp8DecodeParams(NamedTuple):
    x: InT
    norm: InT
    values: InBytes
    x_scales: InFloat
    weight: InBytes
    weight_scales: InFloat
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    eps: Float32
    static_scale: Float32
    accumulate: Int32
    gated: Int32


FP8_DECODE = KernelSpec(
    file="linear/fp8_decode.cu",
    name="fp8_decode_kernel",
    template=("T", "Out", "TOKENS", "UNITS", "STAGES", "BLOCKS"),
    params=Fp8DecodeParams,
    min_arch=89,
    overlaps=True,
    on_demand=True,
)
SPECS = (FP8_DECODE,)
declare_header("fp8_decode", __name__, params=(Fp8DecodeParams,))
declare_header("fp8_product", __name__, {"SCALES": GROUP})

HALVES = 2  # of a warp's step, of 64 elements each
STEP = GROUP  # elements of each row that a warp takes at a time
LANE_BYTES = 16
MAX_ROWS = 16
MAX_RESIDENT_FEATURES = 32768  # of the one row that a block keeps in shared memory


@dataclass(frozen=True)
class Fp8DecodeTile:
    """A variant of the kernel: the most rows, units of 8 weight rows at a time, stages of the ring."""

    tokens: int
    units: int
    stages: int

    def template(self, dtype: str, out_dtype: str, *, groups: bool) -> tuple[str, ...]:
        numbers = (str(self.tokens), str(self.units), str(self.stages))
        return (dtype, out_dtype, *numbers, "true" if groups else "false")

    def steps(self, in_features: int) -> int:
        """That each warp takes."""
        return ceil_div(in_features, STEP * WARPS)

    def shared_bytes(self, in_features: int) -> int:
        """Dynamic shared memory of a block; the codes of a single row of x stay in it."""
        groups = ceil_div(self.tokens, 8)
        resident = self.tokens == 1
        loads = HALVES * (self.units + (0 if resident else groups))
        ring = self.stages * loads * THREADS * LANE_BYTES
        sums = self.units * UNIT * (1 if resident else groups * 8) * float32.itemsize  # of a warp
        if not resident:
            return ring + WARPS * sums
        steps = self.steps(in_features)
        codes = steps * STEP
        return ring + WARPS * (max(codes * HALF_BYTES, codes + sums) + steps * float32.itemsize)

    def fits(self, in_features: int, limit: int) -> bool:
        """Whether a block has this much shared memory, beside a few sums of each warp."""
        beside = 2 * WARPS * float32.itemsize
        return self.shared_bytes(in_features) + beside <= limit


# Units and stages by tokens. Of deep rings of several rows a multiprocessor has room for one. Short rings are for
# blocks all of whose weights they hold; there the next products' come meanwhile.
SIZES = {
    1: ((2, 3), (2, 8), (4, 2), (4, 3), (4, 4), (6, 2), (6, 3)),
    8: ((1, 4), (1, 8), (2, 3), (2, 6), (4, 2), (4, 3), (6, 3), (8, 2)),
    16: ((1, 3), (1, 6), (2, 2), (2, 4), (4, 2), (4, 3), (6, 3), (8, 2)),
}
LOGITS_UNITS = 4


def tiles_of(tokens: int, *, logits: bool) -> list[Fp8DecodeTile]:
    return [Fp8DecodeTile(tokens, *size) for size in SIZES[tokens] if not logits or size[0] == LOGITS_UNITS]


def choose_tile(problem: Fp8Problem, multiprocessors: int, shared_bytes: int) -> Fp8DecodeTile | None:
    """As many units as a block has to do, if they can be taken at once, and a ring that is deep or holds them all.

    Of a single row that the kernel quantises: the units of which the fewest are empty, beside the neighbour's block.
    """
    tokens = 1 if problem.from_x else 8 if problem.num_rows <= 8 else 16
    fitting = [
        tile
        for tile in tiles_of(tokens, logits=problem.out_dtype == "float")
        if tile.units > problem.gated and tile.fits(problem.in_features, shared_bytes)
    ]
    if not fitting:
        return None
    needed = ceil_div(ceil_div(problem.features, UNIT), multiprocessors) * (1 + problem.gated)
    if problem.from_x:
        room = most_bytes(shared_bytes, ends_half=problem.ends_half)
        fitting = [tile for tile in fitting if tile.shared_bytes(problem.in_features) <= room] or fitting
        units = min((tile.units for tile in fitting), key=lambda units: cost_of_row(units, needed))
    else:
        units = next((tile.units for tile in fitting if tile.units >= needed), fitting[-1].units)
    rings = [tile for tile in fitting if tile.units == units]
    stages = rings[0].steps(problem.in_features) * ceil_div(needed, units)  # with all weights of a block
    return next((tile for tile in rings if tile.stages >= stages), rings[-1])


def takes_row(in_features: int, num_rows: int) -> bool:
    """Whether a product of so many rows is of a row that the kernel quantises itself."""
    return num_rows == 1 and in_features <= MAX_RESIDENT_FEATURES


def _accepts(problem: Fp8Problem, device: CudaDevice) -> Fp8DecodeTile | None:
    if problem.num_rows > MAX_ROWS or problem.in_order or not FP8_DECODE.supports(device.arch):
        return None
    if problem.features % 2 or (problem.gated and problem.groups and problem.features % UNIT):
        return None
    if problem.gated and (problem.biased or problem.accumulates):
        return None
    return choose_tile(problem, device.multiprocessors, device.max_shared_bytes)


def _launch(device: CudaDevice, problem: Fp8Problem, tile: Fp8DecodeTile, operands: Fp8Operands) -> None:
    blocks = min(device.multiprocessors, ceil_div(problem.features, UNIT))
    shared_bytes = tile.shared_bytes(problem.in_features)
    if problem.from_x:
        shared_bytes = asked_bytes(shared_bytes, device.max_shared_bytes, ends_half=problem.ends_half)
    config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), shared_bytes)
    params = Fp8DecodeParams(
        x=operands.x,
        norm=operands.norm,
        values=operands.values,
        x_scales=operands.scales,
        weight=operands.part.tensors["values"],
        weight_scales=operands.part.tensors["scales"],
        bias=operands.bias,
        out=operands.out,
        num_rows=problem.num_rows,
        out_features=problem.weight_rows,
        in_features=problem.in_features,
        out_stride=operands.out_stride,
        eps=operands.eps,
        static_scale=format_of(operands.part).input_scale or 0.0,
        accumulate=problem.accumulates,
        gated=problem.gated,
    )
    device.launch(FP8_DECODE, tile.template(problem.dtype, problem.out_dtype, groups=problem.groups), config, params)


def kernels_of(dtype: str, *, groups: bool) -> list[Instantiation]:
    """All that may be launched for elements of this C type."""
    return [
        (FP8_DECODE, tile.template(dtype, out, groups=groups))
        for out in (dtype, "float")
        for tokens in SIZES
        for tile in tiles_of(tokens, logits=out == "float")
    ]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [kernel for dtype in halves for groups in (False, True) for kernel in kernels_of(dtype, groups=groups)]


FP8_LINEAR.register(Candidate("decode", SPECS, _accepts, _launch, order=0))
