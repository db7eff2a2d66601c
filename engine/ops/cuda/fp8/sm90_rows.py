"""Products of 2 to 32 e4m3 rows with TMA and wgmma of sm_90a: plans of `sm90_fp8_rows_kernel`.

A row's result does not depend on the other rows, nor on their number: the parts in which its sums are added depend on
the weight and the GPU.
"""

from __future__ import annotations

from itertools import chain, product
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InT, Int32, OutT, TensorMap
from tessera.engine.cuda.tensor_map import SWIZZLE_BYTES, box_map, parts_map
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.fp8.problem import FP8_LINEAR, Fp8Operands, Fp8Problem
from tessera.engine.ops.cuda.fp8.sm90 import as_pairs
from tessera.engine.ops.cuda.linear.sm90_kernels import WARP_ROWS, WGMMA_M
from tessera.engine.ops.cuda.neighbours import asked_bytes, most_bytes
from tessera.engine.ops.cuda.types import WARP_SIZE, ceil_div
from tessera.engine.tensor import float32


class Sm90Fp8RowsParams(NamedTuple):
    x_map: TensorMap
    weight_map: TensorMap
    x_scales: InFloat
    weight_scales: InFloat
    bias: InT
    out: OutT
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    stages: Int32
    accumulate: Int32
    gated: Int32


SM90_FP8_ROWS = KernelSpec(
    file="fp8/sm90_fp8_rows.cu",
    name="sm90_fp8_rows_kernel",
    template=("T", "TILES", "FOLD", "MOST_ROWS", "BLOCKS"),
    params=Sm90Fp8RowsParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_FP8_ROWS,)
RING_STAGES = Constant(24, "of the ring, at most")
declare_header("sm90_fp8_rows", __name__, {"RING_STAGES": RING_STAGES}, (Sm90Fp8RowsParams,))

GROUPS = 2  # of warps that multiply
GROUP_WARPS = 4
WARPS = GROUPS * GROUP_WARPS + 2  # of a block, of which two copy
MIN_STAGES = 2
STATIC_BYTES = 2 << 10  # of a block's shared memory: barriers and scales
FEW_ROUNDS = 4  # of a ring in half of a multiprocessor's shared memory, that leaves the rest to attention
NORM_BYTES = 12 << 10  # left to the norm of the next layer


class Stage(NamedTuple):
    """Of the ring: how many products of 64 rows it has, of how many parts of k each of them is, and for how many rows
    of x there is room."""

    tiles: int
    fold: int
    rows: int

    @property
    def slabs(self) -> int:
        """Of 16 rows of the weight."""
        return self.tiles * GROUP_WARPS // self.fold

    @property
    def nbytes(self) -> int:
        return (self.tiles * WGMMA_M + self.fold * self.rows) * SWIZZLE_BYTES

    @property
    def parts_bytes(self) -> int:
        """Of the sums that warps leave for each other."""
        return GROUPS * self.slabs * self.fold * WARP_ROWS * self.rows * float32.itemsize


# By the most rows of x, ascending. A stage of four products of 32 rows would take more registers than two blocks have.
STAGES = {
    16: (Stage(1, 2, 16), Stage(1, 1, 16), Stage(2, 1, 16), Stage(4, 1, 16)),
    32: (Stage(1, 2, 32), Stage(1, 1, 32), Stage(2, 1, 32)),
}
MAX_ROWS = max(STAGES)


class Plan(NamedTuple):
    """`asked`: shared memory that a launch asks for, of which it may need less."""

    stage: Stage
    stages: int
    blocks: int
    asked: int


def choose_plan(problem: Fp8Problem, multiprocessors: int, shared_bytes: int) -> Plan:
    """All slabs of a block in one stage, if they fit; a ring that leaves half where few rounds of it are all.

    A ring that goes round has as many stages for each group of warps, so that each stage is always the same group's:
    one that came to a stage before the other group's copy had arrived would take its barrier's older phase for its own.
    """
    shared_bytes -= STATIC_BYTES
    all_slabs = ceil_div(problem.features, WARP_ROWS // (1 + problem.gated))
    blocks = min(all_slabs, multiprocessors)
    slabs = ceil_div(all_slabs, blocks)
    of_rows = next(stages for rows, stages in STAGES.items() if problem.num_rows <= rows)
    stage = next((stage for stage in of_rows if slabs <= stage.slabs), of_rows[-1])
    turns = ceil_div(slabs, stage.slabs)
    beside = 0 if turns == 1 else stage.parts_bytes
    steps = turns * ceil_div(problem.in_features, stage.fold * SWIZZLE_BYTES)

    def ring(nbytes: int) -> int:
        stages = min((nbytes - beside) // stage.nbytes, RING_STAGES)
        return max(min(stages // GROUPS * GROUPS, steps), MIN_STAGES)

    half = ring(most_bytes(shared_bytes, has_half=True))
    few = steps <= FEW_ROUNDS * half
    stages = half if few else ring(shared_bytes - (0 if problem.gated else NORM_BYTES))
    used = stages * stage.nbytes + beside
    return Plan(stage, stages, blocks, asked_bytes(used, shared_bytes, has_half=few and stages < steps))


def _accepts(problem: Fp8Problem, device: CudaDevice) -> Plan | None:
    if not SM90_FP8_ROWS.supports(device.arch) or problem.from_x or problem.num_rows > MAX_ROWS:
        return None
    if problem.in_order or problem.out_dtype != problem.dtype:
        return None
    if problem.gated and (problem.biased or problem.accumulates):
        return None
    return choose_plan(problem, device.multiprocessors, device.max_shared_bytes)


def _launch(device: CudaDevice, problem: Fp8Problem, plan: Plan, operands: Fp8Operands) -> None:
    assert operands.values is not None
    x, weight = as_pairs(operands.values), as_pairs(operands.part.tensors["values"])
    parts = 1 + problem.gated
    params = Sm90Fp8RowsParams(
        x_map=box_map(x, problem.num_rows),
        weight_map=parts_map(weight, parts, WARP_ROWS // parts),
        x_scales=operands.scales,
        weight_scales=operands.part.tensors["scales"],
        bias=operands.bias,
        out=operands.out,
        num_rows=problem.num_rows,
        out_features=problem.weight_rows,
        in_features=problem.in_features,
        out_stride=operands.out_stride,
        stages=plan.stages,
        accumulate=problem.accumulates,
        gated=problem.gated,
    )
    config = LaunchConfig((plan.blocks, 1, 1), (WARPS * WARP_SIZE, 1, 1), plan.asked)
    device.launch(SM90_FP8_ROWS, template_of(plan.stage, problem.dtype, groups=problem.groups), config, params)


def template_of(stage: Stage, dtype: str, *, groups: bool) -> tuple[str, ...]:
    return (dtype, *map(str, stage), "true" if groups else "false")


def kernels_of(dtype: str, *, groups: bool) -> list[Instantiation]:
    """All that may be launched for elements of this C type."""
    stages = chain.from_iterable(STAGES.values())
    return [(SM90_FP8_ROWS, template_of(stage, dtype, groups=groups)) for stage in stages]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    kinds = product((dtype for dtype in dtypes if dtype != "float"), (False, True))
    return [kernel for dtype, groups in kinds for kernel in kernels_of(dtype, groups=groups)]


FP8_LINEAR.register(Candidate("sm90_rows", SPECS, _accepts, _launch, order=-1))
