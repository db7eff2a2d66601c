"""Differences, quotients, sums into place, and columns of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Float32, InT, Int32, Int64, OutT, Pointer
from tessera.engine.ops.cuda.types import CHUNK, FLAT_BLOCK, ceil_div, cuda_type, flat_config
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor

FILE = "training/elementwise.cu"
InSource = Annotated[Pointer, "const Source*"]
OutTarget = Annotated[Pointer, "Target*"]


class PairParams(NamedTuple):
    a: InT
    b: InT
    out: OutT
    size: Int64


class AddRowParams(NamedTuple):
    x: InT
    row: InT
    out: OutT
    width: Int32


class AddToParams(NamedTuple):
    x: InSource
    out: OutTarget
    size: Int64
    factor: Float32


class BroadcastParams(NamedTuple):
    x: InSource
    out: OutTarget
    size: Int64


class CopyColumnsParams(NamedTuple):
    x: InT
    out: OutT
    x_width: Int32
    x_start: Int32
    out_width: Int32
    out_start: Int32
    width: Int32
    factor: Float32


SUBTRACT = KernelSpec(FILE, "subtract_kernel", ("T",), PairParams, on_demand=True)
DIVIDE = KernelSpec(FILE, "divide_kernel", ("T",), PairParams, on_demand=True)
ADD_ROW = KernelSpec(FILE, "add_row_kernel", ("T",), AddRowParams, on_demand=True)
ADD_TO = KernelSpec(FILE, "add_to_kernel", ("Source", "Target"), AddToParams, on_demand=True)
BROADCAST = KernelSpec(FILE, "broadcast_kernel", ("Source", "Target"), BroadcastParams, on_demand=True)
COPY_COLUMNS = KernelSpec(FILE, "copy_columns_kernel", ("T", "ACCUMULATES"), CopyColumnsParams, on_demand=True)
SPECS = (SUBTRACT, DIVIDE, ADD_ROW, ADD_TO, BROADCAST, COPY_COLUMNS)
declare_header(
    "training_elementwise",
    __name__,
    params=(PairParams, AddRowParams, AddToParams, BroadcastParams, CopyColumnsParams),
)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types; sums also to and from float."""
    pairs: list[Instantiation] = [(spec, (dtype,)) for spec in (SUBTRACT, DIVIDE, ADD_ROW) for dtype in dtypes]
    pairs += [(COPY_COLUMNS, (dtype, flag)) for dtype in dtypes for flag in ("true", "false")]
    mixed = dict.fromkeys((a, b) for dtype in dtypes for a in ("float", dtype) for b in ("float", dtype))
    return pairs + [(spec, types) for spec in (ADD_TO, BROADCAST) for types in mixed]


def rows_config(rows: int, width: int) -> LaunchConfig:
    """A row's blocks along y."""
    return LaunchConfig((rows, ceil_div(width, FLAT_BLOCK * CHUNK), 1), (FLAT_BLOCK, 1, 1))


class ElementwiseOps(TrainingOps):
    device: CudaDevice

    def _sub(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        params = PairParams(a=a, b=b, out=out, size=a.size)
        self.device.launch(SUBTRACT, (cuda_type(a.dtype),), flat_config(a.size), params)

    def _div(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        params = PairParams(a=a, b=b, out=out, size=a.size)
        self.device.launch(DIVIDE, (cuda_type(a.dtype),), flat_config(a.size), params)

    def _add_row(self, x: Tensor, row: Tensor, out: Tensor) -> None:
        params = AddRowParams(x=x, row=row, out=out, width=x.shape[1])
        self.device.launch(ADD_ROW, (cuda_type(x.dtype),), rows_config(*x.shape), params)

    def _broadcast(self, x: Tensor, out: Tensor) -> None:
        template = (cuda_type(x.dtype), cuda_type(out.dtype))
        self.device.launch(BROADCAST, template, flat_config(out.size), BroadcastParams(x=x, out=out, size=out.size))

    def _add_to(self, out: Tensor, x: Tensor, factor: float) -> None:
        template = (cuda_type(x.dtype), cuda_type(out.dtype))
        params = AddToParams(x=x, out=out, size=x.size, factor=factor)
        self.device.launch(ADD_TO, template, flat_config(x.size), params)

    def _columns(self, x: Tensor, start: int, factor: float, out: Tensor) -> None:
        self._copy_columns(x, start, out, 0, out.shape[1], factor)

    def _join_columns(self, parts: Sequence[Tensor], out: Tensor) -> None:
        start = 0
        for part in parts:
            self._copy_columns(part, 0, out, start, part.shape[1], 1.0)
            start += part.shape[1]

    def _add_columns(self, x: Tensor, part: Tensor, start: int, factor: float, out: Tensor) -> None:
        if out.pointer != x.pointer:
            self.device.copy(out.pointer, x.pointer, x.nbytes)
        self._copy_columns(part, 0, out, start, part.shape[1], factor, accumulates=True)

    def _copy_columns(
        self, x: Tensor, x_start: int, out: Tensor, start: int, width: int, factor: float, *, accumulates: bool = False
    ) -> None:
        params = CopyColumnsParams(
            x=x,
            out=out,
            x_width=x.shape[1],
            x_start=x_start,
            out_width=out.shape[1],
            out_start=start,
            width=width,
            factor=factor,
        )
        template = (cuda_type(x.dtype), "true" if accumulates else "false")
        self.device.launch(COPY_COLUMNS, template, rows_config(x.shape[0], width), params)
