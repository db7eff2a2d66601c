"""The product of few rows in the order of sums that the kernels for many rows have: docs/kernels/order-of-sums.md.

Only products in order take it. Every variant gives the same bits, also with the norm before it or by another kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, OutOut
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.types import HALF_BYTES, SEGMENT, WARP_SIZE, ceil_div, rmsnorm_config
from tessera.engine.tensor import float32


class OrderedMatmulParams(NamedTuple):
    x: InT
    norm: InT
    weight: InT
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    x_buffers: Int32
    norm_threads: Int32
    eps: Float32
    accumulate: Int32
    gated: Int32


ORDERED_MATMUL = KernelSpec(
    file="linear/ordered_matmul.cu",
    name="ordered_matmul_kernel",
    template=("T", "Out", "TOKENS", "UNITS", "WARPS", "STAGES"),
    params=OrderedMatmulParams,
    overlaps=True,
    batch_invariant=True,
)
SPECS = (ORDERED_MATMUL,)

UNIT = Constant(8, "rows of the weight that one tensor-core instruction takes")
STEP_K = Constant(64, "elements of each row of the weight in a stage of a warp's ring")
CHUNK_K = Constant(512, "elements of each row of x that are copied at a time")
STREAMED_BUFFERS = Constant(4, "of chunks of x, where not all of them find room")
declare_header(
    "ordered_matmul",
    __name__,
    {"UNIT": UNIT, "STEP_K": STEP_K, "CHUNK_K": CHUNK_K, "STREAMED_BUFFERS": STREAMED_BUFFERS},
    (OrderedMatmulParams,),
)


@dataclass(frozen=True)
class OrderedTile:
    """A variant of the kernel.

    Attributes:
        tokens: the most rows of x.
        units: of 8 weight rows that a warp takes at a time.
        warps: of a block.
        stages: of a warp's ring.
    """

    tokens: int
    units: int
    warps: int
    stages: int

    def template(self, dtype: str, out_dtype: str) -> tuple[str, ...]:
        return (dtype, out_dtype, str(self.tokens), str(self.units), str(self.warps), str(self.stages))

    def x_buffers(self, num_rows: int, in_features: int, shared_limit: int) -> int:
        """Chunks of x that a block keeps: all that there are, or so many that they come one after the other; else 0."""
        chunk_bytes = num_rows * (CHUNK_K + SEGMENT) * HALF_BYTES
        static_bytes = self.tokens * WARP_SIZE * float32.itemsize
        room = (shared_limit - static_bytes - self.ring_bytes) // chunk_bytes
        chunks = ceil_div(in_features, CHUNK_K)
        if room >= chunks:
            return chunks
        return int(STREAMED_BUFFERS) if room >= STREAMED_BUFFERS else 0

    @property
    def ring_bytes(self) -> int:
        return self.warps * self.stages * self.units * UNIT * STEP_K * HALF_BYTES

    def config(self, features: int, num_rows: int, x_buffers: int, blocks: int, *, gated: bool) -> LaunchConfig:
        """`features` of the result; as many blocks, unless there are fewer groups of units."""
        groups = ceil_div(features, UNIT if gated else UNIT * self.units)
        shared_bytes = self.ring_bytes + x_buffers * num_rows * (CHUNK_K + SEGMENT) * HALF_BYTES
        return LaunchConfig((min(blocks, groups), 1, 1), (self.warps * WARP_SIZE, 1, 1), shared_bytes)


class OrderedPlan(NamedTuple):
    tile: OrderedTile
    x_buffers: int


TOKENS = (8, 16, 32)
SIZES = ((1, 4, 16), (1, 8, 12), (2, 4, 8), (2, 8, 6))  # units, warps and stages
LOGITS_SIZES = (SIZES[3],)
MANY_UNITS = 16  # for each multiprocessor, beyond which warps take two at a time: x is read half as often
MAX_NORMED_ROWS = 4  # more are normalised faster by a kernel of their own, once instead of by every block


def choose_ordered_tile(
    num_rows: int, features: int, multiprocessors: int, *, gated: bool, logits: bool
) -> OrderedTile | None:
    """The variant for a result [num_rows, features]; None for more rows than any takes."""
    tokens = next((tokens for tokens in TOKENS if tokens >= num_rows), None)
    if tokens is None:
        return None
    needed = ceil_div(ceil_div(features, UNIT), multiprocessors)  # units of a block
    units = 2 if gated or needed > MANY_UNITS else 1
    groups = needed if gated else ceil_div(needed, units)
    if logits:
        return OrderedTile(tokens, *LOGITS_SIZES[0])
    sizes = [size for size in SIZES if size[0] == units]
    return OrderedTile(tokens, *next((size for size in sizes if size[1] >= groups), sizes[-1]))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [
        (ORDERED_MATMUL, OrderedTile(tokens, *size).template(dtype, out_dtype))
        for dtype in halves
        for out_dtype, sizes in ((dtype, SIZES), ("float", LOGITS_SIZES))
        for tokens in TOKENS
        for size in sizes
    ]


def _accepts(problem: LinearProblem, device: CudaDevice) -> OrderedPlan | None:
    if not problem.in_order or not problem.is_half or not problem.in_segments or problem.gelu:
        return None
    if problem.normed and problem.num_rows > MAX_NORMED_ROWS:
        return None
    many_rows = sm90.can_do(problem, device)
    if problem.gated and not many_rows:
        return None  # more rows would be rounded before the gate
    if many_rows and problem.num_rows >= sm90.least_rows(problem, device):
        return None
    tile = choose_ordered_tile(
        problem.num_rows, problem.features, device.multiprocessors, gated=problem.gated, logits=problem.logits
    )
    if tile is None:
        return None
    x_buffers = tile.x_buffers(problem.num_rows, problem.in_features, device.max_shared_bytes)
    if x_buffers == 0 or (problem.normed and x_buffers * CHUNK_K < problem.in_features):
        return None
    return OrderedPlan(tile, x_buffers)


def _launch(device: CudaDevice, problem: LinearProblem, plan: OrderedPlan, operands: LinearOperands) -> None:
    num_rows, in_features = problem.num_rows, problem.in_features
    config = plan.tile.config(problem.features, num_rows, plan.x_buffers, device.multiprocessors, gated=problem.gated)
    params = OrderedMatmulParams(
        x=operands.x,
        norm=operands.norm,
        weight=operands.weight,
        bias=operands.bias,
        out=operands.out,
        num_rows=num_rows,
        out_features=problem.weight_rows,
        in_features=in_features,
        x_buffers=plan.x_buffers,
        norm_threads=rmsnorm_config(num_rows, in_features).block[0],
        eps=operands.eps,
        accumulate=problem.accumulates,
        gated=problem.gated,
    )
    device.launch(ORDERED_MATMUL, plan.tile.template(problem.dtype, problem.out_dtype), config, params)


LINEAR.register(Candidate("ordered", SPECS, _accepts, _launch, order=0))
