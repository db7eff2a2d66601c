"""Products of up to 16 e4m3 rows, of which pairs of blocks each have half of k: `fp8_pair_decode_kernel`.

Bit for bit those of `decode.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InT, Int32, OutT
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.fp8.decode import HALVES, LANE_BYTES, InBytes
from tessera.engine.ops.cuda.fp8.problem import FP8_LINEAR, Fp8Operands, Fp8Problem
from tessera.engine.ops.cuda.linear.decode import THREADS, UNIT, WARPS
from tessera.engine.ops.cuda.types import ceil_div
from tessera.engine.tensor import float32


class Fp8PairDecodeParams(NamedTuple):
    values: InBytes
    x_scales: InFloat
    weight: InBytes
    weight_scales: InFloat
    bias: InT
    out: OutT
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    out_stride: Int32
    accumulate: Int32


FP8_PAIR_DECODE = KernelSpec(
    file="linear/fp8_pair_decode.cu",
    name="fp8_pair_decode_kernel",
    template=("T", "BLOCKS"),
    params=Fp8PairDecodeParams,
    min_arch=90,
    overlaps=True,
    on_demand=True,
)
SPECS = (FP8_PAIR_DECODE,)

PAIR = Constant(2, "blocks")
PAIR_TOKENS = Constant(16, "rows, at most")
PAIR_UNITS = Constant(8, "of 8 weight rows that a pair takes at a time")
PAIR_STAGES = Constant(4, "of the ring")
declare_header(
    "fp8_pair_decode",
    __name__,
    {"PAIR": PAIR, "PAIR_TOKENS": PAIR_TOKENS, "PAIR_UNITS": PAIR_UNITS, "PAIR_STAGES": PAIR_STAGES},
    (Fp8PairDecodeParams,),
)

GROUPS = PAIR_TOKENS // 8
MIN_ELEMENTS = 128 << 10  # of x, of which half takes longer from L2 than the exchange of sums


def shared_bytes() -> int:
    """Dynamic shared memory of a block."""
    ring = PAIR_STAGES * HALVES * (PAIR_UNITS + GROUPS) * (THREADS // PAIR) * LANE_BYTES
    return ring + WARPS * (PAIR_UNITS // PAIR) * UNIT * PAIR_TOKENS * float32.itemsize


def worthwhile(num_rows: int, features: int, in_features: int, multiprocessors: int) -> bool:
    """Whether x is much, and a pair has but one tile: of two, x comes twice."""
    units = ceil_div(ceil_div(features, UNIT), multiprocessors // PAIR)
    return num_rows * in_features >= MIN_ELEMENTS and units <= PAIR_UNITS


def _accepts(problem: Fp8Problem, device: CudaDevice) -> bool | None:
    """A plan that says nothing."""
    if problem.num_rows > PAIR_TOKENS or problem.from_x or problem.in_order or problem.gated:
        return None
    if problem.features % 2 or problem.out_dtype != problem.dtype or not FP8_PAIR_DECODE.supports(device.arch):
        return None
    sizes = (problem.num_rows, problem.features, problem.in_features)
    return (worthwhile(*sizes, device.multiprocessors) and shared_bytes() <= device.max_shared_bytes) or None


def _launch(device: CudaDevice, problem: Fp8Problem, _: bool, operands: Fp8Operands) -> None:
    blocks = min(device.multiprocessors // PAIR, ceil_div(problem.features, UNIT)) * PAIR
    config = LaunchConfig((blocks, 1, 1), (THREADS // PAIR, 1, 1), shared_bytes(), PAIR)
    params = Fp8PairDecodeParams(
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
        accumulate=problem.accumulates,
    )
    device.launch(FP8_PAIR_DECODE, (problem.dtype, "true" if problem.groups else "false"), config, params)


def kernels_of(dtype: str, *, groups: bool) -> list[Instantiation]:
    """All that may be launched for elements of this C type."""
    return [(FP8_PAIR_DECODE, (dtype, "true" if groups else "false"))]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that may be launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    return [kernel for dtype in halves for groups in (False, True) for kernel in kernels_of(dtype, groups=groups)]


FP8_LINEAR.register(Candidate("pairs", SPECS, _accepts, _launch, order=0))
