"""RMSNorm and LayerNorm."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import Float32, InT, Int32, OutT
from tessera.engine.ops.cuda.types import (
    CHUNK,
    NORM_CHUNKS,
    NORM_THREADS,
    aligned,
    cuda_type,
    rmsnorm_config,
    row_config,
)
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor


class RmsnormParams(NamedTuple):
    x: InT
    weight: InT
    out: OutT
    hidden: Int32
    eps: Float32


class RmsnormAddParams(NamedTuple):
    x: InT
    stream: InT
    weight: InT
    out: OutT
    hidden: Int32
    eps: Float32


class LayernormParams(NamedTuple):
    x: InT
    weight: InT
    bias: InT
    out: OutT
    hidden: Int32
    eps: Float32


class NormColumnsParams(NamedTuple):
    x: OutT
    weight: InT
    width: Int32
    first: Int32
    size: Int32
    eps: Float32


RMSNORM = KernelSpec(
    file="norm/rmsnorm.cu",
    name="rmsnorm_kernel",
    template=("T", "WHOLE"),
    params=RmsnormParams,
    overlaps=True,
)
RMSNORM_ADD = KernelSpec(
    file="norm/rmsnorm.cu",
    name="rmsnorm_add_kernel",
    template=("T", "WHOLE"),
    params=RmsnormAddParams,
    overlaps=True,
    on_demand=True,
)
LAYERNORM = KernelSpec(
    file="norm/layernorm.cu",
    name="layernorm_kernel",
    template=("T",),
    params=LayernormParams,
)
NORM_COLUMNS = KernelSpec(
    file="norm/columns.cu",
    name="norm_columns_kernel",
    template=("T", "CENTRED"),
    params=NormColumnsParams,
    on_demand=True,
)
SPECS = (RMSNORM, RMSNORM_ADD, LAYERNORM, NORM_COLUMNS)

RMSNORM_CONSTANTS = {"MAX_THREADS": NORM_THREADS, "ROW_CHUNKS": NORM_CHUNKS}
declare_header("rmsnorm", __name__, RMSNORM_CONSTANTS, (RmsnormParams, RmsnormAddParams))
declare_header("layernorm", __name__, params=(LayernormParams,))
declare_header("columns", __name__, params=(NormColumnsParams,))

FLAGS = ("true", "false")


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    flagged = [
        (spec, (dtype, flag)) for spec in (RMSNORM, RMSNORM_ADD, NORM_COLUMNS) for dtype in dtypes for flag in FLAGS
    ]
    return flagged + [(LAYERNORM, (dtype,)) for dtype in dtypes]


def _rmsnorm_template(x: Tensor, *others: Tensor) -> tuple[str, str]:
    whole = x.shape[1] % CHUNK == 0 and aligned(16, x, *others)
    return cuda_type(x.dtype), "true" if whole else "false"


class NormOps(Ops):
    device: CudaDevice

    def _rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        template = _rmsnorm_template(x, weight, out)
        params = RmsnormParams(x=x, weight=weight, out=out, hidden=hidden, eps=eps)
        self.device.launch(RMSNORM, template, rmsnorm_config(rows, hidden), params)

    def _rmsnorm_add(self, x: Tensor, weight: Tensor, eps: float, stream: Tensor, out: Tensor) -> None:
        rows, hidden = x.shape
        template = _rmsnorm_template(x, weight, stream, out)
        params = RmsnormAddParams(x=x, stream=stream, weight=weight, out=out, hidden=hidden, eps=eps)
        self.device.launch(RMSNORM_ADD, template, rmsnorm_config(rows, hidden), params)

    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        config = row_config(rows, hidden)
        params = LayernormParams(x=x, weight=weight, bias=bias, out=out, hidden=hidden, eps=eps)
        self.device.launch(LAYERNORM, (cuda_type(x.dtype),), config, params)

    def _norm_columns(self, x: Tensor, weight: Tensor, eps: float, first: int, groups: int, centred: bool) -> None:
        rows, width = x.shape
        size = weight.shape[0] // groups
        config = row_config(rows, size)._replace(grid=(rows, groups, 1))
        params = NormColumnsParams(x=x, weight=weight, width=width, first=first, size=size, eps=eps)
        self.device.launch(NORM_COLUMNS, (cuda_type(x.dtype), FLAGS[not centred]), config, params)
