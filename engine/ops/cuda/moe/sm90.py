"""Products of many rows by experts' weights with TMA and wgmma of sm_90a.

A row's result does not depend on the other rows: sums are of 16 elements of k after another, in one chain.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InInt, InT, Int32, OutT, TensorMap
from tessera.engine.cuda.tensor_map import box_map
from tessera.engine.ops.cuda.linear.sm90 import BLOCK_THREADS, MULTIPLE, Plan, Tile
from tessera.engine.ops.cuda.linear.sm90_kernels import MAX_STAGES
from tessera.engine.ops.cuda.moe.experts import ACTIVATIONS, ExpertOperands
from tessera.engine.ops.cuda.types import HALF_BYTES, aligned, ceil_div, cuda_type


class Sm90ExpertMatmulParams(NamedTuple):
    x_map: TensorMap
    weight_map: TensorMap
    bias: InT
    offsets: InInt
    out: OutT
    num_experts: Int32
    out_features: Int32
    in_features: Int32
    stages: Int32
    activation: Int32


SM90_EXPERT_MATMUL = KernelSpec(
    file="moe/sm90_expert_matmul.cu",
    name="sm90_expert_matmul_kernel",
    template=("T", "WARPGROUPS_M", "WARPGROUP_N"),
    params=Sm90ExpertMatmulParams,
    min_arch=90,
    arch_specific=True,
    overlaps=True,
    on_demand=True,
)
SPECS = (SM90_EXPERT_MATMUL,)
declare_header("sm90_expert_matmul", __name__, params=(Sm90ExpertMatmulParams,))

STATIC_BYTES = 5120  # of shared memory, up to where the ring begins
# From as many rows of an expert on average on.
TILES = ((0, Tile(1, 64)), (48, Tile(2, 128)), (160, Tile(2, 256)))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    return [(SM90_EXPERT_MATMUL, _template(tile, dtype)) for dtype in dtypes if dtype != "float" for _, tile in TILES]


def _template(tile: Tile, dtype: str) -> tuple[str, ...]:
    return (dtype, str(tile.warpgroups_m), str(tile.warpgroup_n))


def choose_tile(num_pairs: int, num_experts: int) -> Tile:
    """Larger ones for more rows of an expert."""
    return next(tile for least, tile in reversed(TILES) if num_pairs >= least * num_experts)


def can_do(device: CudaDevice, operands: ExpertOperands) -> bool:
    """Whether the kernel does the product; rows of x must be sorted by expert."""
    if operands.x.dtype.itemsize != HALF_BYTES or not SM90_EXPERT_MATMUL.supports(device.arch):
        return False
    if operands.activation not in ACTIVATIONS:
        return False
    sizes = operands.in_features % MULTIPLE == 0 and operands.out.shape[1] % MULTIPLE == 0
    return sizes and aligned(16, operands.x, operands.weight, operands.out) and aligned(4, operands.bias)


def launch(device: CudaDevice, operands: ExpertOperands) -> None:
    """Submit the product with its activation."""
    assert not operands.gathers, "rows are gathered beforehand"
    gated = operands.activation is not None
    plan = Plan(choose_tile(operands.num_pairs, operands.num_experts))
    tile = plan.tile
    beside = plan.bytes_beside_ring(HALF_BYTES)
    stages = min(MAX_STAGES, (device.max_shared_bytes - STATIC_BYTES - beside) // plan.stage_bytes)
    params = Sm90ExpertMatmulParams(
        x_map=box_map(operands.x, tile.m),
        weight_map=box_map(operands.weight, plan.weight_box_rows(silu_mul=gated)),
        bias=operands.bias,
        offsets=operands.routed.offsets,
        out=operands.out,
        num_experts=operands.num_experts,
        out_features=operands.out_features,
        in_features=operands.in_features,
        stages=stages,
        activation=ACTIVATIONS[operands.activation],
    )
    # Every expert may have a rest of rows.
    row_tiles = ceil_div(operands.num_pairs, tile.m) + min(operands.num_experts, operands.num_pairs)
    blocks = min(row_tiles * ceil_div(operands.out_features, tile.n), device.multiprocessors)
    config = LaunchConfig((blocks, 1, 1), (BLOCK_THREADS, 1, 1), stages * plan.stage_bytes + beside)
    device.launch(SM90_EXPERT_MATMUL, _template(tile, cuda_type(operands.x.dtype)), config, params)
