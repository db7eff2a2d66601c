"""Products by experts' weights in tiles, on every device.

A row's result does not depend on the other rows: sums are of 16 elements of k after another, in one chain.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InInt, InT, Int32, OutT
from tessera.engine.ops.cuda.moe.experts import ExpertOperands
from tessera.engine.ops.cuda.types import HALF_BYTES, aligned, ceil_div, cuda_type


class ExpertMatmulParams(NamedTuple):
    x: InT
    weight: InT
    bias: InT
    offsets: InInt
    pairs: InInt
    out: OutT
    num_experts: Int32
    out_features: Int32
    in_features: Int32
    top_k: Int32


EXPERT_MATMUL = KernelSpec(
    file="moe/expert_matmul.cu",
    name="expert_matmul_kernel",
    template=("T",),
    params=ExpertMatmulParams,
    overlaps=True,
    on_demand=True,
)
EXPERT_MATMUL_FLOAT32 = KernelSpec(
    file="moe/expert_matmul.cu",
    name="expert_matmul_float32_kernel",
    template=("T",),
    params=ExpertMatmulParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (EXPERT_MATMUL, EXPERT_MATMUL_FLOAT32)
EXPERT_TILE = Constant(64, "rows and columns of a tile")
declare_header("expert_matmul", __name__, {"EXPERT_TILE": EXPERT_TILE}, (ExpertMatmulParams,))

THREADS = 128
SHARED_BYTES = 4 * 2 * EXPERT_TILE * 64 * HALF_BYTES  # of 16-bit elements
BLOCKS_A_MULTIPROCESSOR = 2


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(EXPERT_MATMUL_FLOAT32 if dtype == "float" else EXPERT_MATMUL, (dtype,)) for dtype in dtypes]


def can_do(operands: ExpertOperands) -> bool:
    """Whether 16-bit elements fit the kernel; float32 always does."""
    if operands.x.dtype.itemsize != HALF_BYTES:
        return True
    in_segments = operands.in_features % 8 == 0 and operands.out_features % 2 == 0
    return in_segments and aligned(16, operands.x, operands.weight) and aligned(4, operands.out, operands.bias)


def launch(device: CudaDevice, operands: ExpertOperands) -> None:
    """Submit the product, without an activation."""
    assert operands.activation is None, "the activation is a kernel of its own"
    is_half = operands.x.dtype.itemsize == HALF_BYTES
    params = ExpertMatmulParams(
        x=operands.x,
        weight=operands.weight,
        bias=operands.bias,
        offsets=operands.routed.offsets,
        pairs=operands.pairs,
        out=operands.out,
        num_experts=operands.num_experts,
        out_features=operands.out_features,
        in_features=operands.in_features,
        top_k=operands.top_k,
    )
    # Every expert may have a rest of rows.
    row_tiles = ceil_div(operands.num_pairs, EXPERT_TILE) + min(operands.num_experts, operands.num_pairs)
    tiles = row_tiles * ceil_div(operands.out_features, EXPERT_TILE)
    blocks = min(tiles, BLOCKS_A_MULTIPROCESSOR * device.multiprocessors)
    config = LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), SHARED_BYTES if is_half else 0)
    spec = EXPERT_MATMUL if is_half else EXPERT_MATMUL_FLOAT32
    device.launch(spec, (cuda_type(operands.x.dtype),), config, params)
