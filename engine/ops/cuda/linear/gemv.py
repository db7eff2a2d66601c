"""The product for up to four rows in plain arithmetic: float32 and odd sizes."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Int32, RestrictInT, RestrictOutOut
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.linear.costs import costs_of
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.types import HALF_BYTES, WARP_SIZE, ceil_div
from tessera.engine.tensor import float32


class MatvecParams(NamedTuple):
    x: RestrictInT
    weight: RestrictInT
    bias: RestrictInT
    out: RestrictOutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    accumulate: Int32
    warps_per_output: Int32


MATVEC = KernelSpec(
    file="linear/gemv.cu",
    name="matvec_kernel",
    template=("T", "Out", "ROWS"),
    params=MatvecParams,
)
SPECS = (MATVEC,)

MATVEC_ROWS = (1, 2, 4)
MATVEC_WARPS = Constant(4, "of a block")
MATVEC_WARPS_PER_OUTPUT = (4, 2)
declare_header("gemv", __name__, {"WARPS": MATVEC_WARPS}, (MatvecParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    kinds = [(dtype, out_dtype) for dtype in dtypes for out_dtype in sorted({dtype, "float"})]
    return [(MATVEC, (*kind, str(rows))) for kind in kinds for rows in MATVEC_ROWS]


def matvec_rows(num_rows: int) -> int:
    """The smallest instantiation that holds `num_rows`."""
    return next(rows for rows in MATVEC_ROWS if rows >= num_rows)


def matvec_warps_per_output(out_features: int, in_features: int, itemsize: int, most_warps: int) -> int:
    """More than one warp an output while outputs have fewer than `most_warps`, and each lane a 16-byte vector.

    Must not depend on the number of rows: it decides the order of the sums.
    """
    vectors = in_features * itemsize // 16
    for warps in MATVEC_WARPS_PER_OUTPUT:
        if vectors >= warps * WARP_SIZE and out_features * warps <= most_warps:
            return warps
    return 1


def matvec_config(out_features: int, warps_per_output: int) -> LaunchConfig:
    blocks = ceil_div(out_features * warps_per_output, MATVEC_WARPS)
    return LaunchConfig((blocks, 1, 1), (MATVEC_WARPS * WARP_SIZE, 1, 1))


def _accepts(problem: LinearProblem, device: CudaDevice) -> int | None:
    """Warps an output."""
    if problem.num_rows > MATVEC_ROWS[-1] or problem.normed or problem.gated or problem.in_order:
        return None
    itemsize = HALF_BYTES if problem.is_half else float32.itemsize
    most_warps = costs_of(device).portable.gemv_warps * device.multiprocessors
    return matvec_warps_per_output(problem.features, problem.in_features, itemsize, most_warps)


def _launch(device: CudaDevice, problem: LinearProblem, warps: int, operands: LinearOperands) -> None:
    params = MatvecParams(
        x=operands.x,
        weight=operands.weight,
        bias=operands.bias,
        out=operands.out,
        num_rows=problem.num_rows,
        out_features=problem.features,
        in_features=problem.in_features,
        accumulate=problem.accumulates,
        warps_per_output=warps,
    )
    template = (problem.dtype, problem.out_dtype, str(matvec_rows(problem.num_rows)))
    device.launch(MATVEC, template, matvec_config(problem.features, warps), params)


LINEAR.register(Candidate("gemv", SPECS, _accepts, _launch, order=2))
