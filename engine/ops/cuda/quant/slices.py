"""The sums of a product whose k was cut into slices, added up."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InT, Int32, OutOut
from tessera.engine.ops.cuda.types import C_TYPE_NAMES, ceil_div
from tessera.engine.tensor import Tensor, float32


class AddSlicesParams(NamedTuple):
    sums: InFloat
    bias: InT
    out: OutOut
    num_rows: Int32
    features: Int32
    slices: Int32
    out_stride: Int32
    accumulate: Int32


ADD_SLICES = KernelSpec(
    file="linear/add_slices.cu",
    name="add_slices_kernel",
    template=("T", "Out"),
    params=AddSlicesParams,
    overlaps=True,
    on_demand=True,
)
SPECS = (ADD_SLICES,)

MAX_SLICES = Constant(8, "whose sums a thread has on the way")
declare_header("add_slices", __name__, {"MAX_SLICES": MAX_SLICES}, (AddSlicesParams,))

THREADS, COLUMNS = 256, 2  # of a block, of a thread


def nbytes_of(slices: int, rows: int, features: int) -> int:
    return slices * rows * features * float32.itemsize


def launch(device: CudaDevice, params: AddSlicesParams, dtype: str, out_dtype: str) -> None:
    grid = (ceil_div(params.features, THREADS * COLUMNS), params.num_rows, 1)
    device.launch(ADD_SLICES, (dtype, out_dtype), LaunchConfig(grid, (THREADS, 1, 1)), params)


def place_of(room: Tensor | None, slices: int, rows: int, features: int) -> int | None:
    """Where the sums lie in `room`; None where that is too small."""
    return None if room is None or room.nbytes < nbytes_of(slices, rows, features) else room.pointer


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != C_TYPE_NAMES[float32]]
    return [(ADD_SLICES, (dtype, out)) for dtype in halves for out in (dtype, C_TYPE_NAMES[float32])]
