"""Rows gathered for experts, and experts' outputs combined."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InInt, InT, Int32, OutT
from tessera.engine.ops.cuda.types import CHUNK, FLAT_BLOCK, MAX_CACHED_CONFIGS, aligned, ceil_div, cuda_type
from tessera.engine.ops.moe_interface import Routed
from tessera.engine.tensor import Tensor


class GatherRowsParams(NamedTuple):
    x: InT
    pairs: InInt
    out: OutT
    width: Int32
    top_k: Int32


class CombineExpertsParams(NamedTuple):
    x: InT
    weights: InFloat
    places: InInt
    shared: InT
    shared_gate: InFloat
    out: OutT
    width: Int32
    top_k: Int32
    accumulate: Int32
    settled: Int32
    whole: Int32


GATHER_ROWS = KernelSpec(
    file="moe/rows.cu",
    name="gather_rows_kernel",
    template=("T",),
    params=GatherRowsParams,
    overlaps=True,
    on_demand=True,
)
COMBINE_EXPERTS = KernelSpec(
    file="moe/rows.cu",
    name="combine_experts_kernel",
    template=("T",),
    params=CombineExpertsParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (GATHER_ROWS, COMBINE_EXPERTS)
COMBINE_BATCH = Constant(8, "experts of a token whose rows are read at a time")
FEW_ROWS = 32  # of which smaller blocks use more multiprocessors
FEW_ROWS_BLOCK = 64
declare_header(
    "expert_rows", __name__, {"COMBINE_BATCH": COMBINE_BATCH}, params=(GatherRowsParams, CombineExpertsParams)
)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    return [(spec, (dtype,)) for spec in SPECS for dtype in dtypes]


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def rows_config(num_rows: int, width: int, threads: int = FLAT_BLOCK) -> LaunchConfig:
    """Blocks that cover a row along y."""
    return LaunchConfig((num_rows, ceil_div(width, threads * CHUNK), 1), (threads, 1, 1))


def launch_gather(device: CudaDevice, x: Tensor, routed: Routed, out: Tensor) -> None:
    """out [P, K] = the rows of x [T, K], sorted by expert."""
    num_pairs, width = out.shape
    params = GatherRowsParams(x=x, pairs=routed.pairs, out=out, width=width, top_k=routed.experts.shape[1])
    device.launch(GATHER_ROWS, (cuda_type(x.dtype),), rows_config(num_pairs, width), params)


def launch_combine(
    device: CudaDevice,
    x: Tensor,
    routed: Routed,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    out: Tensor,
    *,
    accumulate: bool,
    settled: bool = False,
) -> None:
    """See `Ops.combine_experts`. `settled`: the routing and `out` were there before the kernel in front began."""
    num_tokens, width = out.shape
    params = CombineExpertsParams(
        x=x,
        weights=routed.weights,
        places=routed.places,
        shared=shared,
        shared_gate=shared_gate,
        out=out,
        width=width,
        top_k=routed.experts.shape[1],
        accumulate=accumulate,
        settled=settled,
        whole=width % CHUNK == 0 and aligned(16, x, out),
    )
    threads = FEW_ROWS_BLOCK if num_tokens <= FEW_ROWS else FLAT_BLOCK
    device.launch(COMBINE_EXPERTS, (cuda_type(x.dtype),), rows_config(num_tokens, width, threads), params)
