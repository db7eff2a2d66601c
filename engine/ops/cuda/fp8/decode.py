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
from tessera.engine.ops.cuda.fp8.problem import FP8_LINEAR, Fp8Operands, Fp8Problem, format_of
from tessera.engine.ops.cuda.linear.decode import LEAST_UNITS, THREADS, UNIT, WARPS, cost_of_row
from tessera.engine.ops.cuda.linear.quantize_rows import GROUP
from tessera.engine.ops.cuda.neighbours import asked_bytes, asks_half, most_bytes
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
    file="fp8/fp8_decode.cu",
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

    @property
    def groups(self) -> int:
        """Of 8 rows of x."""
        return ceil_div(self.tokens, 8)

    def steps(self, in_features: int) -> int:
        """That each warp takes."""
        return ceil_div(in_features, STEP * WARPS)

    def rounds(self, needed: int, in_features: int) -> float:
        """That its ring goes round where a block has `needed` units; in at most one it holds all weights of it."""
        return self.steps(in_features) * ceil_div(needed, self.units) / self.stages

    def loads(self, needed: int) -> int:
        """Units of weights, empty ones too, and groups of rows of x that a block reads for a part of k."""
        return ceil_div(needed, self.units) * (self.units + self.groups)

    def shared_bytes(self, in_features: int) -> int:
        """Dynamic shared memory of a block; the codes of a single row of x stay in it."""
        resident = self.tokens == 1
        loads = HALVES * (self.units + (0 if resident else self.groups))
        ring = self.stages * loads * THREADS * LANE_BYTES
        sums = self.units * UNIT * (1 if resident else self.groups * 8) * float32.itemsize  # of a warp
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
# blocks all of whose weights they hold; there the next products' come meanwhile. A product of several rows whose ring
# goes round no more than FEW_ROUNDS times leaves half of the multiprocessor to attention and quantising, and asks for
# the other half, so that none gets two of its blocks.
SIZES = {
    1: ((2, 3), (2, 8), (4, 2), (4, 3), (4, 4), (6, 2), (6, 3)),
    8: ((1, 4), (1, 8), (2, 3), (2, 6), (4, 2), (4, 3), (6, 3), (8, 2)),
    16: ((1, 3), (1, 6), (2, 2), (2, 4), (4, 2), (4, 3), (6, 3), (8, 2)),
}
LOGITS_UNITS = 4
FEW_ROUNDS = 4


def tiles_of(tokens: int, *, logits: bool) -> list[Fp8DecodeTile]:
    return [Fp8DecodeTile(tokens, *size) for size in SIZES[tokens] if not logits or size[0] == LOGITS_UNITS]


def choose_tile(problem: Fp8Problem, multiprocessors: int, shared_bytes: int) -> Fp8DecodeTile | None:
    """The units with which a block reads least, and a ring that is deep, holds all its weights or leaves half.

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
    needed = units_of_block(problem, multiprocessors)
    if problem.from_x:
        room = most_bytes(shared_bytes, has_half=_row_has_half(problem, multiprocessors))
        fitting = [tile for tile in fitting if tile.shared_bytes(problem.in_features) <= room] or fitting
        units = min((tile.units for tile in fitting), key=lambda units: cost_of_row(units, needed))
        return _ring(fitting, units, needed, problem.in_features)
    whole = _of_least_loads(fitting, needed, problem.in_features)
    if whole.rounds(needed, problem.in_features) <= 1:
        return whole
    room = most_bytes(shared_bytes, has_half=True)
    halves = [tile for tile in fitting if tile.shared_bytes(problem.in_features) <= room]
    if halves:
        half = _of_least_loads(halves, needed, problem.in_features)
        if half.rounds(needed, problem.in_features) <= FEW_ROUNDS:
            return half
    return whole


def units_of_block(problem: Fp8Problem, multiprocessors: int) -> int:
    return ceil_div(ceil_div(problem.features, UNIT), multiprocessors) * (1 + problem.gated)


def _of_least_loads(tiles: list[Fp8DecodeTile], needed: int, in_features: int) -> Fp8DecodeTile:
    """For several rows; of those that read as much the one with the larger ring."""
    enough = [tile for tile in tiles if tile.units >= min(needed, LEAST_UNITS)] or tiles
    best = min(enough, key=lambda tile: (tile.loads(needed), -tile.shared_bytes(in_features)))
    return _ring(tiles, best.units, needed, in_features)


def _ring(tiles: list[Fp8DecodeTile], units: int, needed: int, in_features: int) -> Fp8DecodeTile:
    """Of so many units the first that holds all weights of a block, or the deepest."""
    rings = [tile for tile in tiles if tile.units == units]
    return next((tile for tile in rings if tile.rounds(needed, in_features) <= 1), rings[-1])


def _row_has_half(problem: Fp8Problem, multiprocessors: int) -> bool:
    return asks_half(problem.features, problem.in_features, multiprocessors, ends_half=problem.ends_half)


def launch_bytes(problem: Fp8Problem, tile: Fp8DecodeTile, multiprocessors: int, shared_bytes: int) -> int:
    """Shared memory that a launch asks for, with what `choose_tile` gives for the problem."""
    used = tile.shared_bytes(problem.in_features)
    if problem.from_x:
        return asked_bytes(used, shared_bytes, has_half=_row_has_half(problem, multiprocessors))
    rounds = tile.rounds(units_of_block(problem, multiprocessors), problem.in_features)
    return asked_bytes(used, shared_bytes, has_half=1 < rounds <= FEW_ROUNDS)


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
    shared_bytes = launch_bytes(problem, tile, device.multiprocessors, device.max_shared_bytes)
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
