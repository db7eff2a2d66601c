"""Causal attention over packed sequences and its backward on tensor cores of every architecture."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InFloat, InInt, InT, Int32, OutFloat, OutT
from tessera.engine.ops.cuda.training.packed import PackedProblem
from tessera.engine.ops.cuda.types import HALF_BYTES, SEGMENT, WARP_SIZE, aligned, cuda_type
from tessera.engine.tensor import Tensor, float32


class PackedFlashParams(NamedTuple):
    qkv: InT
    cu_seqlens: InInt
    out: OutT
    logsumexp: OutFloat
    num_tokens: Int32
    tiles: Int32
    num_heads: Int32
    num_kv_heads: Int32
    window: Int32
    scale: Float32


class PackedFlashGradientParams(NamedTuple):
    qkv: InT
    cu_seqlens: InInt
    dout: InT
    logsumexp: InFloat
    delta: InFloat
    dqkv: OutT
    num_tokens: Int32
    tiles: Int32
    num_heads: Int32
    num_kv_heads: Int32
    window: Int32
    scale: Float32


TEMPLATE = ("T", "HEAD_DIM")
FLASH_ATTENTION = KernelSpec("training/flash.cu", "flash_attention_kernel", TEMPLATE, PackedFlashParams, on_demand=True)
QUERY_GRADIENT = KernelSpec(
    "training/flash_gradient.cu",
    "flash_query_gradient_kernel",
    TEMPLATE,
    PackedFlashGradientParams,
    on_demand=True,
)
KEY_GRADIENT = KernelSpec(
    "training/flash_gradient.cu",
    "flash_key_gradient_kernel",
    TEMPLATE,
    PackedFlashGradientParams,
    on_demand=True,
)
SPECS = (FLASH_ATTENTION, QUERY_GRADIENT, KEY_GRADIENT)

HEAD_DIMS = (32, 64, 80, 96, 128)
WARPS = Constant(4, "of a block")
ROW_TILES = Constant(2, "of 16 queries, that a warp has")
TILE_KEYS = Constant(32, "keys at a time")
GRADIENT_ROWS = Constant(64, "queries, or keys, of a block of the backward")
GRADIENT_TILE = Constant(32, "keys at a time, for the gradient of queries")
TILE_QUERIES = Constant(32, "queries at a time, for the gradient of keys")
declare_header(
    "training_flash",
    __name__,
    {
        "WARPS": WARPS,
        "ROW_TILES": ROW_TILES,
        "TILE_KEYS": TILE_KEYS,
        "GRADIENT_ROWS": GRADIENT_ROWS,
        "GRADIENT_TILE": GRADIENT_TILE,
        "TILE_QUERIES": TILE_QUERIES,
    },
    (PackedFlashParams, PackedFlashGradientParams),
)
TILE_ROWS = 16 * ROW_TILES * WARPS


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [(spec, (dtype, str(head_dim))) for spec in SPECS for dtype in halves for head_dim in HEAD_DIMS]


def can_do(problem: PackedProblem, *others: Tensor) -> bool:
    """Whether these kernels can do it; `others` are read and written beside qkv."""
    is_half = problem.qkv.dtype != float32
    return is_half and problem.head_dim in HEAD_DIMS and problem.scale > 0 and aligned(16, problem.qkv, *others)


def _config(problem: PackedProblem, rows: int, heads: int, tile_rows: int, floats: int = 0) -> LaunchConfig:
    """`tile_rows`: of all tiles in shared memory."""
    shared_bytes = tile_rows * (problem.head_dim + SEGMENT) * HALF_BYTES + floats * float32.itemsize
    return LaunchConfig(problem.grid(rows, heads), (WARPS * WARP_SIZE, 1, 1), shared_bytes)


def launch_attention(device: CudaDevice, problem: PackedProblem, out: Tensor, logsumexp: Tensor) -> None:
    config = _config(problem, TILE_ROWS, problem.num_heads, TILE_ROWS + 4 * TILE_KEYS)
    params = PackedFlashParams(out=out, logsumexp=logsumexp, **problem.fields(TILE_ROWS))
    device.launch(FLASH_ATTENTION, (cuda_type(out.dtype), str(problem.head_dim)), config, params)


def launch_gradient(
    device: CudaDevice, problem: PackedProblem, dout: Tensor, logsumexp: Tensor, delta: Tensor, dqkv: Tensor
) -> None:
    params = PackedFlashGradientParams(
        dout=dout, logsumexp=logsumexp, delta=delta, dqkv=dqkv, **problem.fields(GRADIENT_ROWS)
    )
    template = (cuda_type(dout.dtype), str(problem.head_dim))
    rows = 2 * GRADIENT_ROWS + 4 * GRADIENT_TILE
    device.launch(QUERY_GRADIENT, template, _config(problem, GRADIENT_ROWS, problem.num_heads, rows), params)
    rows = 2 * GRADIENT_ROWS + 4 * TILE_QUERIES
    config = _config(problem, GRADIENT_ROWS, problem.num_kv_heads, rows, floats=4 * TILE_QUERIES)
    device.launch(KEY_GRADIENT, template, config, params)
