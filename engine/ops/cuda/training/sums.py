"""Sums over all elements and over rows, in two stages whose order depends on the shape alone."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InT, Int32, Int64, OutFloat
from tessera.engine.ops.cuda.types import CHUNK, FLAT_BLOCK, WARP_SIZE, ceil_div, cuda_type
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, empty, float32

FILE = "training/sums.cu"


class PartialSumParams(NamedTuple):
    x: InT
    partial: OutFloat
    size: Int64


class TotalParams(NamedTuple):
    partial: InFloat
    out: OutFloat
    num_partials: Int32
    accumulate: Int32


class ColumnSumsParams(NamedTuple):
    x: InT
    of: InT
    statistics: InFloat
    partial: OutFloat
    rows: Int64
    width: Int32


class AddPartialsParams(NamedTuple):
    partial: InFloat
    out: OutFloat
    size: Int64
    num_partials: Int32
    accumulate: Int32


PARTIAL_SUM = KernelSpec(FILE, "partial_sum_kernel", ("T", "SQUARED"), PartialSumParams, on_demand=True)
TOTAL = KernelSpec(FILE, "total_kernel", (), TotalParams, on_demand=True)
COLUMN_SUMS = KernelSpec(FILE, "column_sums_kernel", ("T", "NORMED"), ColumnSumsParams, on_demand=True)
ADD_PARTIALS = KernelSpec(FILE, "add_partials_kernel", (), AddPartialsParams, on_demand=True)
SPECS = (PARTIAL_SUM, TOTAL, COLUMN_SUMS, ADD_PARTIALS)

MAX_PARTIALS = Constant(1024, "of the sum of all elements")
ROWS_AT_ONCE = Constant(8, "warps of a block that sums columns")
CHUNK_ROWS = Constant(128, "of a partial sum of columns")
COLUMNS = Constant(WARP_SIZE * CHUNK, "of a block that sums columns")
declare_header(
    "training_sums",
    __name__,
    {"MAX_PARTIALS": MAX_PARTIALS, "ROWS_AT_ONCE": ROWS_AT_ONCE, "CHUNK_ROWS": CHUNK_ROWS, "COLUMNS": COLUMNS},
    (PartialSumParams, TotalParams, ColumnSumsParams, AddPartialsParams),
)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types; squares are of floats."""
    pairs: list[Instantiation] = [(TOTAL, ()), (ADD_PARTIALS, ()), (PARTIAL_SUM, ("float", "true"))]
    types = dict.fromkeys(("float", *dtypes))  # losses are float
    pairs += [(PARTIAL_SUM, (dtype, "false")) for dtype in types]
    return pairs + [(COLUMN_SUMS, (dtype, flag)) for dtype in dtypes for flag in ("true", "false")]


def column_sums_config(rows: int, width: int) -> LaunchConfig:
    return LaunchConfig((ceil_div(width, COLUMNS), ceil_div(rows, CHUNK_ROWS), 1), (WARP_SIZE * ROWS_AT_ONCE, 1, 1))


def add_partials(device: CudaDevice, partial: Tensor, out: Tensor, *, accumulate: bool) -> None:
    """The sum of partial [C, *out's shape] float32 over C."""
    params = AddPartialsParams(
        partial=partial, out=out, size=out.size, num_partials=partial.shape[0], accumulate=accumulate
    )
    config = LaunchConfig((ceil_div(out.size, FLAT_BLOCK), 1, 1), (FLAT_BLOCK, 1, 1))
    device.launch(ADD_PARTIALS, (), config, params)


def sum_columns(
    device: CudaDevice,
    x: Tensor,
    out: Tensor,
    *,
    accumulate: bool,
    of: Tensor | None = None,
    statistics: Tensor | None = None,
) -> None:
    """The sum of the rows of x [M, N] to out [N] float32; of x times what `of` [M, N] is, normalised by statistics
    [M, 2], where that is given."""
    config = column_sums_config(*x.shape)
    partial = empty((config.grid[1], x.shape[1]), float32, device)
    params = ColumnSumsParams(x=x, of=of, statistics=statistics, partial=partial, rows=x.shape[0], width=x.shape[1])
    device.launch(COLUMN_SUMS, (cuda_type(x.dtype), "false" if of is None else "true"), config, params)
    add_partials(device, partial, out, accumulate=accumulate)


class SumOps(TrainingOps):
    device: CudaDevice

    def _sum(self, x: Tensor, out: Tensor) -> None:
        self._sum_all(x, out, squared=False, accumulate=False)

    def _square_sum(self, x: Tensor, out: Tensor) -> None:
        self._sum_all(x, out, squared=True, accumulate=True)

    def _sum_rows(self, x: Tensor, out: Tensor, accumulate: bool) -> None:
        sum_columns(self.device, x, out, accumulate=accumulate)

    def _sum_all(self, x: Tensor, out: Tensor, *, squared: bool, accumulate: bool) -> None:
        blocks = max(min(ceil_div(x.size, FLAT_BLOCK * CHUNK), MAX_PARTIALS), 1)
        partial = empty((blocks,), float32, self.device)
        template = (cuda_type(x.dtype), "true" if squared else "false")
        config = LaunchConfig((blocks, 1, 1), (FLAT_BLOCK, 1, 1))
        self.device.launch(PARTIAL_SUM, template, config, PartialSumParams(x=x, partial=partial, size=x.size))
        total = TotalParams(partial=partial, out=out, num_partials=blocks, accumulate=accumulate)
        self.device.launch(TOTAL, (), LaunchConfig((1, 1, 1), (MAX_PARTIALS, 1, 1)), total)
