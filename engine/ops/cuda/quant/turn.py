"""Activations in the order of k in which lanes have the elements of a packed weight."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, OutT
from tessera.engine.ops.cuda.types import HALF_BYTES, ceil_div, cuda_type, rmsnorm_config
from tessera.engine.tensor import Tensor


class TurnRowsParams(NamedTuple):
    x: InT
    out: OutT
    columns: Int32
    steps: Int32


class TurnNormParams(NamedTuple):
    x: InT
    weight: InT
    out: OutT
    hidden: Int32
    steps: Int32
    eps: Float32


TURN_ROWS = KernelSpec(
    file="quant/turn_rows.cu",
    name="turn_rows_kernel",
    template=("T",),
    params=TurnRowsParams,
    overlaps=True,
    on_demand=True,
)
TURN_NORM = KernelSpec(
    file="quant/turn_rows.cu",
    name="turn_norm_kernel",
    template=("T",),
    params=TurnNormParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (TURN_ROWS, TURN_NORM)
declare_header("turn_rows", __name__, params=(TurnRowsParams, TurnNormParams))

STEP, ROUNDS = 128, 4  # elements that are turned together, by so many threads
THREADS = 128


def nbytes_for(rows: int, columns: int) -> int:
    """Of turned rows of 16-bit elements."""
    return rows * ceil_div(columns, STEP) * STEP * HALF_BYTES


def place_of(x: Tensor, room: Tensor) -> Tensor | None:
    """Where x [M, K] turned lies in `room`, [M, K up to a multiple of 128]; None where that is too small."""
    rows, columns = x.shape
    if x.dtype.itemsize != HALF_BYTES or room.nbytes < nbytes_for(rows, columns):
        return None
    return Tensor(room.buffer, (rows, ceil_div(columns, STEP) * STEP), x.dtype, room.offset)


def launch(device: CudaDevice, x: Tensor, out: Tensor) -> None:
    """Turn x into the place that is for it."""
    rows, columns = x.shape
    steps = out.shape[1] // STEP
    config = LaunchConfig((ceil_div(steps * ROUNDS, THREADS), rows, 1), (THREADS, 1, 1))
    params = TurnRowsParams(x=x, out=out, columns=columns, steps=steps)
    device.launch(TURN_ROWS, (cuda_type(x.dtype),), config, params)


def launch_norm(device: CudaDevice, x: Tensor, norm: Tensor, eps: float, out: Tensor) -> None:
    """Turn x normed by its root mean square; x and norm 16-byte aligned."""
    rows, hidden = x.shape
    params = TurnNormParams(x=x, weight=norm, out=out, hidden=hidden, steps=out.shape[1] // STEP, eps=eps)
    device.launch(TURN_NORM, (cuda_type(x.dtype),), rmsnorm_config(rows, hidden), params)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(spec, (dtype,)) for spec in SPECS for dtype in dtypes if dtype != "float"]
