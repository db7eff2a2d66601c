"""The product in float32 without tensor cores."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Int32, RestrictInFloat, RestrictOutFloat
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.types import ceil_div


class MatmulFloat32Params(NamedTuple):
    x: RestrictInFloat
    weight: RestrictInFloat
    bias: RestrictInFloat
    out: RestrictOutFloat
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    accumulate: Int32


MATMUL_FLOAT32 = KernelSpec(
    file="linear/matmul_float32.cu",
    name="matmul_float32_kernel",
    template=("TILE",),
    params=MatmulFloat32Params,
)
SPECS = (MATMUL_FLOAT32,)

TILES = (128, 64)
SIDE = Constant(16, "of the square of a block's threads")
declare_header("matmul_float32", __name__, {"THREADS_PER_SIDE": SIDE}, (MatmulFloat32Params,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(MATMUL_FLOAT32, (str(tile),)) for tile in TILES if "float" in dtypes]


def float32_tile(num_rows: int, out_features: int, multiprocessors: int) -> int:
    """Large tiles where they give every multiprocessor one."""
    large, small = TILES
    return large if ceil_div(num_rows, large) * ceil_div(out_features, large) >= multiprocessors else small


def float32_config(num_rows: int, out_features: int, tile: int) -> LaunchConfig:
    grid = (ceil_div(out_features, tile), ceil_div(num_rows, tile), 1)
    return LaunchConfig(grid, (SIDE * SIDE, 1, 1))


def _accepts(problem: LinearProblem, device: CudaDevice) -> int | None:
    """The side of a tile."""
    if problem.is_half or problem.normed or problem.gated:
        return None
    return float32_tile(problem.num_rows, problem.features, device.multiprocessors)


def _launch(device: CudaDevice, problem: LinearProblem, side: int, operands: LinearOperands) -> None:
    params = MatmulFloat32Params(
        x=operands.x,
        weight=operands.weight,
        bias=operands.bias,
        out=operands.out,
        num_rows=problem.num_rows,
        out_features=problem.features,
        in_features=problem.in_features,
        accumulate=problem.accumulates,
    )
    config = float32_config(problem.num_rows, problem.features, side)
    device.launch(MATMUL_FLOAT32, (str(side),), config, params)


LINEAR.register(Candidate("float32", SPECS, _accepts, _launch, order=3))
