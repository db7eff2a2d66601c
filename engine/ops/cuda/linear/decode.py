"""The product of a decode step: which variant of `matmul_decode_kernel` runs, and on how many blocks.

A row's result does not depend on the other rows, nor on their number while `units` and `halves` are the same: every
sum runs over the same eight interleaved parts of k in the same order. (With a norm before it, one row and
several may differ in the last bit of the root.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, OutOut, OutT
from tessera.engine.ops.cuda.candidates import Candidate, Choice
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.neighbours import asked_bytes, asks_half, most_bytes
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, HALF_BYTES, SEGMENT, WARP_SIZE, aligned, ceil_div
from tessera.engine.tensor import bfloat16, float32


class MatmulDecodeParams(NamedTuple):
    x: InT
    update: InT
    update_norm: InT
    sum: OutT
    norm: InT
    weight: InT
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    eps: Float32
    update_eps: Float32
    accumulate: Int32
    gated: Int32


MATMUL_DECODE = KernelSpec(
    file="linear/matmul_decode.cu",
    name="matmul_decode_kernel",
    template=("T", "Out", "TOKENS", "UNITS", "STAGES", "HALVES"),
    params=MatmulDecodeParams,
    overlaps=True,
)
SPECS = (MATMUL_DECODE,)

WARPS = Constant(8, "of a block")
UNIT = Constant(8, "rows of the weight that one tensor-core instruction takes")
HALF_K = Constant(32, "elements of each row that a warp takes by 16 bytes a lane")
SUM_LANES = 4  # of a warp, which have the sums of one row
SUM_VECTORS = Constant(3, "of 8 elements that a lane keeps of a row to which an update is added")
ROW_LOADS = Constant(5, "of 8 elements that a lane asks for at once of a row that it copies")
CONSTANTS = {"WARPS": WARPS, "UNIT": UNIT, "HALF_K": HALF_K, "SUM_VECTORS": SUM_VECTORS, "ROW_LOADS": ROW_LOADS}
declare_header("matmul_decode", __name__, CONSTANTS, (MatmulDecodeParams,))

THREADS = WARPS * WARP_SIZE
SEGMENT_BYTES = SEGMENT * HALF_BYTES


class Limits(NamedTuple):
    """What a device has: its multiprocessors, and the shared memory a block may use."""

    multiprocessors: int
    shared_bytes: int


def limits_of(device: CudaDevice) -> Limits:
    return Limits(device.multiprocessors, device.max_shared_bytes)


@dataclass(frozen=True)
class DecodeTile:
    """A variant of the kernel.

    Attributes:
        tokens: the most rows of x.
        units: of 8 weight rows that a block takes at a time.
        stages: of the ring of copies.
        halves: of 32 elements of k that a warp takes at a time.
    """

    tokens: int
    units: int
    stages: int
    halves: int = 2

    def template(self, dtype: str, out_dtype: str) -> tuple[str, ...]:
        return (dtype, out_dtype, str(self.tokens), str(self.units), str(self.stages), str(self.halves))

    def shared_bytes(self, in_features: int, *, normed: bool) -> int:
        """Dynamic shared memory of a block; a single row of x stays in it, and so does the norm of any."""
        resident = self.tokens == 1
        groups = ceil_div(self.tokens, 8)
        loads = self.halves * (self.units + (0 if resident else groups))
        ring = self.stages * loads * THREADS * SEGMENT_BYTES
        partial = WARPS * self.units * groups * (SUM_LANES if resident else WARP_SIZE) * 8
        row = self.steps(in_features) * self.halves * HALF_K * WARPS * HALF_BYTES
        return ring + partial + (int(resident) + int(normed)) * row

    def steps(self, in_features: int) -> int:
        """That each warp takes."""
        return ceil_div(in_features, self.halves * HALF_K * WARPS)

    def fits(self, in_features: int, limit: int, *, normed: bool) -> bool:
        """Whether a block has this much shared memory, with the sums of squares of each warp's rows and update."""
        return self.shared_bytes(in_features, normed=normed) + WARPS * (self.tokens + 1) * float32.itemsize <= limit

    def config(self, features: int, in_features: int, limits: Limits, *, normed: bool, ends_half: bool) -> LaunchConfig:
        """`features` of the result; a block for each multiprocessor, unless there are fewer units of 8 features."""
        shared_bytes = self.shared_bytes(in_features, normed=normed)
        if self.tokens == 1:
            has_half = asks_half(features, in_features, limits.multiprocessors, ends_half=ends_half)
            shared_bytes = asked_bytes(shared_bytes, limits.shared_bytes, has_half=has_half)
        blocks = min(limits.multiprocessors, ceil_div(features, UNIT))
        return LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), shared_bytes)


MAX_ROWS = 16
MAX_RESIDENT_FEATURES = ROW_LOADS * THREADS * SEGMENT  # of the one row that a block keeps in shared memory

TOKENS = (1, 8, 16)
# Units and stages.
SIZES = {
    1: ((1, 6), (3, 3), (4, 2), (4, 3), (6, 2)),
    8: ((1, 6), (2, 3), (4, 2), (4, 3), (5, 2), (5, 3), (6, 2), (6, 3)),
    16: ((1, 6), (2, 3), (4, 2), (4, 3), (5, 2), (5, 3), (6, 2), (6, 3)),
}
LOGITS_SIZES = ((4, 2), (6, 3))
WIDE_SIZE = (14, 2, 1)  # units, stages and halves for several rows: they come past all weights fewer times
WIDE_TILES = tuple(DecodeTile(tokens, *WIDE_SIZE) for tokens in TOKENS if tokens > 1)
TILES = (*(DecodeTile(tokens, *size) for tokens in TOKENS for size in SIZES[tokens]), *WIDE_TILES)
LOGITS_TILES = (*(DecodeTile(tokens, *size) for tokens in TOKENS for size in LOGITS_SIZES), *WIDE_TILES)
# Of an attention's products with several rows one leaves room for attention, whose keys are read meanwhile, where its
# ring goes round no more often than that.
ROUNDS_BEFORE_ATTENTION = 2


LEAST_UNITS = 3  # of one row's tile, where a block has as many: rings of fewer hold too few bytes


def cost_of_row(units: int, needed: int) -> tuple[bool, int, int]:
    """Of tiles for one row, the least is best: of the `needed` units that a block takes, `units` at a time."""
    return units < min(needed, LEAST_UNITS), ceil_div(needed, units) * units, -units


def choose_decode_tile(
    num_rows: int,
    features: int,
    in_features: int,
    limits: Limits,
    *,
    gated: bool,
    normed: bool,
    logits: bool,
    float_range: bool,
    ends_half: bool,
) -> DecodeTile | None:
    """The variant for a result [num_rows, features], None where this kernel is not for it.

    Several rows are normalised in a dtype with the range of a float alone, since what enters the product has
    not been divided by the root of its mean square yet.
    As many units as a block has to do, if they can be taken at once: each time that several rows of x come past, they
    are read from the L2, which is as much as the weights after a few times. And where the ring goes round a third
    stage. The few bytes of a short ring leave room for the next kernel's. One row stays, so that it takes the units
    of which the fewest are empty, of the tiles that leave room for the neighbour's block, if there are any.
    """
    one = num_rows == 1 and in_features <= MAX_RESIDENT_FEATURES
    if num_rows > MAX_ROWS or (normed and not one and not float_range):
        return None
    tokens = 1 if one else 8 if num_rows <= 8 else 16
    needed = ceil_div(ceil_div(features, UNIT), limits.multiprocessors) * (1 + gated)

    def fitting(shared_bytes: int) -> list[DecodeTile]:
        return [
            tile
            for tile in (LOGITS_TILES if logits else TILES)
            if tile.tokens == tokens
            and tile.units % (1 + gated) == 0
            and tile.fits(in_features, shared_bytes, normed=normed)
        ]

    has_half = asks_half(features, in_features, limits.multiprocessors, ends_half=ends_half)
    alone = logits and has_half  # nothing comes behind logits
    beside = fitting(most_bytes(limits.shared_bytes, has_half=has_half)) if one and not alone else []
    tiles = beside or fitting(limits.shared_bytes)
    if not tiles:
        return None
    if one:
        units = min((tile.units for tile in tiles), key=lambda units: cost_of_row(units, needed))
    else:
        units = next((tile.units for tile in tiles if tile.units >= needed), tiles[-1].units)
    short, *deep = [tile for tile in tiles if tile.units == units]
    steps = short.steps(in_features) * ceil_div(needed, units)
    before_attention = normed and not one and not gated and not logits
    rounds = ROUNDS_BEFORE_ATTENTION if before_attention else 1
    return deep[-1] if deep and steps > rounds * short.stages else short


def takes_sum(choice: Choice | None, operands: LinearOperands) -> bool:
    """Whether what was chosen adds `operands.added` to x: this kernel does, to the one row that a block keeps, but
    not for logits."""
    added = operands.added
    if choice is None or choice.candidate is not CANDIDATE or added is None or operands.out.dtype != operands.x.dtype:
        return False
    tile: DecodeTile = choice.plan
    vectors = tile.steps(operands.x.shape[1]) * tile.halves * HALF_K // SEGMENT
    fits = tile.tokens == 1 and vectors <= SUM_VECTORS * WARP_SIZE
    return fits and aligned(SEGMENT_BYTES, added.update, added.weight, added.out)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    pairs = [(MATMUL_DECODE, tile.template(dtype, dtype)) for dtype in halves for tile in TILES]
    return pairs + [(MATMUL_DECODE, tile.template(dtype, "float")) for dtype in halves for tile in LOGITS_TILES]


def _accepts(problem: LinearProblem, device: CudaDevice) -> DecodeTile | None:
    if not problem.is_half or not problem.in_segments or problem.in_order:
        return None
    return choose_decode_tile(
        problem.num_rows,
        problem.features,
        problem.in_features,
        limits_of(device),
        gated=problem.gated,
        normed=problem.normed,
        logits=problem.logits,
        float_range=problem.dtype == C_TYPE_NAMES[bfloat16],
        ends_half=problem.ends_half,
    )


def _launch(device: CudaDevice, problem: LinearProblem, tile: DecodeTile, operands: LinearOperands) -> None:
    sizes = problem.features, problem.in_features, limits_of(device)
    config = tile.config(*sizes, normed=problem.normed, ends_half=problem.ends_half)
    added = operands.added
    params = MatmulDecodeParams(
        x=operands.x,
        update=None if added is None else added.update,
        update_norm=None if added is None else added.weight,
        sum=None if added is None else added.out,
        norm=operands.norm,
        weight=operands.weight,
        bias=operands.bias,
        out=operands.out,
        num_rows=problem.num_rows,
        out_features=problem.weight_rows,
        in_features=problem.in_features,
        eps=operands.eps,
        update_eps=0.0 if added is None else added.eps,
        accumulate=problem.accumulates,
        gated=problem.gate,
    )
    device.launch(MATMUL_DECODE, tile.template(problem.dtype, problem.out_dtype), config, params)


CANDIDATE = Candidate("decode", SPECS, _accepts, _launch, order=0)
LINEAR.register(CANDIDATE)
