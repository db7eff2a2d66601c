"""Products of e4m3 rows with mma.sync of sm_89 and later: `fp8_matmul_kernel`.

The order of a row's sums depends on in_features alone, whatever the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InT, Int32, OutOut
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.fp8.decode import InBytes
from tessera.engine.ops.cuda.fp8.problem import FP8_LINEAR, Fp8Operands, Fp8Problem
from tessera.engine.ops.cuda.linear.quantize_rows import GROUP
from tessera.engine.ops.cuda.types import WARP_SIZE, ceil_div


class Fp8MatmulParams(NamedTuple):
    x: InBytes
    x_scales: InFloat
    weight: InBytes
    weight_scales: InFloat
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    accumulate: Int32


FP8_MATMUL = KernelSpec(
    file="fp8/fp8_matmul.cu",
    name="fp8_matmul_kernel",
    template=("T", "Out", "TILE_M", "TILE_N", "BLOCKS"),
    params=Fp8MatmulParams,
    min_arch=89,
    overlaps=True,
    on_demand=True,
)
SPECS = (FP8_MATMUL,)

WARPS_M = Constant(2)
WARPS_N = Constant(4)
STAGES = Constant(3)
TILE_K = Constant(128, "bytes of a row in a stage")
declare_header(
    "fp8_matmul",
    __name__,
    {"WARPS_M": WARPS_M, "WARPS_N": WARPS_N, "STAGES": STAGES, "TILE_K": TILE_K, "SCALES": GROUP},
    (Fp8MatmulParams,),
)


@dataclass(frozen=True)
class Fp8Tile:
    """Rows and columns of a block's part of the result."""

    m: int
    n: int

    def template(self, dtype: str, out_dtype: str, *, groups: bool) -> tuple[str, ...]:
        return (dtype, out_dtype, str(self.m), str(self.n), "true" if groups else "false")

    def config(self, num_rows: int, features: int) -> LaunchConfig:
        grid = (ceil_div(features, self.n), ceil_div(num_rows, self.m), 1)
        return LaunchConfig(grid, (WARPS_M * WARPS_N * WARP_SIZE, 1, 1), STAGES * (self.m + self.n) * TILE_K)

    def cost(self, num_rows: int, features: int, multiprocessors: int) -> float:
        """Rounds of tiles, of which a large one does more for each byte that it reads."""
        blocks = ceil_div(num_rows, self.m) * ceil_div(features, self.n)
        return ceil_div(blocks, multiprocessors) * self.m * self.n * (1.0 if self.n == 128 else 1.4)


TILES = (Fp8Tile(64, 128), Fp8Tile(64, 64), Fp8Tile(32, 64))


def _accepts(problem: Fp8Problem, device: CudaDevice) -> Fp8Tile | None:
    if problem.from_x or problem.gated or problem.features % 2 or not FP8_MATMUL.supports(device.arch):
        return None
    sizes = (problem.num_rows, problem.features)
    fitting = [tile for tile in TILES if tile.config(*sizes).shared_bytes <= device.max_shared_bytes]
    return min(fitting, key=lambda tile: tile.cost(*sizes, device.multiprocessors), default=None)


def _launch(device: CudaDevice, problem: Fp8Problem, tile: Fp8Tile, operands: Fp8Operands) -> None:
    params = Fp8MatmulParams(
        x=operands.values,
        x_scales=operands.scales,
        weight=operands.part.tensors["values"],
        weight_scales=operands.part.tensors["scales"],
        bias=operands.bias,
        out=operands.out,
        num_rows=problem.num_rows,
        out_features=problem.weight_rows,
        in_features=problem.in_features,
        out_stride=operands.out_stride,
        accumulate=problem.accumulates,
    )
    template = tile.template(problem.dtype, problem.out_dtype, groups=problem.groups)
    device.launch(FP8_MATMUL, template, tile.config(problem.num_rows, problem.features), params)


def kernels_of(dtype: str, *, groups: bool) -> list[Instantiation]:
    """All that may be launched for elements of this C type."""
    return [(FP8_MATMUL, tile.template(dtype, out, groups=groups)) for out in (dtype, "float") for tile in TILES]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [kernel for dtype in halves for groups in (False, True) for kernel in kernels_of(dtype, groups=groups)]


FP8_LINEAR.register(Candidate("mma", SPECS, _accepts, _launch, order=2))
