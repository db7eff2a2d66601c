"""Activations in the order of a weight's columns, which GPTQ sorts by their group."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import InInt, InT, Int32, OutT
from tessera.engine.ops.cuda.types import cuda_type, row_config
from tessera.engine.tensor import Tensor


class GatherColumnsParams(NamedTuple):
    x: InT
    order: InInt
    out: OutT
    columns: Int32


GATHER_COLUMNS = KernelSpec(
    file="quant/gather_columns.cu",
    name="gather_columns_kernel",
    template=("T",),
    params=GatherColumnsParams,
    on_demand=True,
)
SPECS = (GATHER_COLUMNS,)
declare_header("gather_columns", __name__, params=(GatherColumnsParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(GATHER_COLUMNS, (dtype,)) for dtype in dtypes]


def gather_columns(device: CudaDevice, x: Tensor, order: Tensor, out: Tensor) -> None:
    """out[r, c] = x[r, order[c]]."""
    rows, columns = x.shape
    params = GatherColumnsParams(x=x, order=order, out=out, columns=columns)
    device.launch(GATHER_COLUMNS, (cuda_type(x.dtype),), row_config(rows, columns), params)
