"""The sums of a product whose k was cut into slices, added up."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InT, Int32, OutOut
from tessera.engine.formats import WeightPart
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
    file="quant/add_slices.cu",
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


class Operands(Protocol):
    """A product's, whichever kernel has computed its slices."""

    @property
    def x(self) -> Tensor: ...
    @property
    def part(self) -> WeightPart: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def out(self) -> int: ...
    @property
    def out_stride(self) -> int: ...


def launch(
    device: CudaDevice, operands: Operands, slices: int, sums: int, dtype: str, out_dtype: str, *, accumulates: bool
) -> None:
    """Submit the end of a product: float32 `sums` [slices, M, N], bias and, if it accumulates, `out` added up."""
    num_rows, features = operands.x.shape[0], operands.part.shape[0]
    params = AddSlicesParams(
        sums=sums,
        bias=operands.bias,
        out=operands.out,
        num_rows=num_rows,
        features=features,
        slices=slices,
        out_stride=operands.out_stride,
        accumulate=accumulates,
    )
    grid = (ceil_div(features, THREADS * COLUMNS), num_rows, 1)
    device.launch(ADD_SLICES, (dtype, out_dtype), LaunchConfig(grid, (THREADS, 1, 1)), params)


def place_of(room: Tensor | None, slices: int, rows: int, features: int) -> int | None:
    """Where the sums lie in `room`; None where that is too small."""
    return None if room is None or room.nbytes < nbytes_of(slices, rows, features) else room.pointer


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != C_TYPE_NAMES[float32]]
    return [(ADD_SLICES, (dtype, out)) for dtype in halves for out in (dtype, C_TYPE_NAMES[float32])]
