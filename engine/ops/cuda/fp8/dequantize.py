"""Rows of e4m3 weights as dense ones: for GPUs before sm_89 and for shapes that no product of e4m3 takes."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import InFloat, InInt, Int32, OutT
from tessera.engine.formats import WeightPart
from tessera.engine.ops.cuda.fp8.decode import InBytes
from tessera.engine.ops.cuda.fp8.problem import format_of
from tessera.engine.ops.cuda.types import cuda_type, row_config
from tessera.engine.tensor import Tensor


class Fp8DequantizeParams(NamedTuple):
    values: InBytes
    scales: InFloat
    ids: InInt
    sampled: InInt
    out: OutT
    num_stored: Int32
    columns: Int32
    high: Int32
    wide: Int32


FP8_DEQUANTIZE = KernelSpec(
    file="fp8/fp8_dequantize.cu",
    name="fp8_dequantize_kernel",
    template=("T",),
    params=Fp8DequantizeParams,
    writes_weights=True,
    on_demand=True,
)
SPECS = (FP8_DEQUANTIZE,)
declare_header("fp8_dequantize", __name__, params=(Fp8DequantizeParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [(FP8_DEQUANTIZE, (dtype,)) for dtype in dtypes]


def launch_dequantize(
    device: CudaDevice, part: WeightPart, ids: Tensor | None, sampled: Tensor | None, out: Tensor
) -> None:
    """Rows of a part, all or those that `ids` name, to `out`."""
    stored, columns = part.shape
    high, wide = format_of(part).block or (1, columns)
    params = Fp8DequantizeParams(
        values=part.tensors["values"],
        scales=part.tensors["scales"],
        ids=ids,
        sampled=sampled,
        out=out,
        num_stored=stored,
        columns=columns,
        high=high,
        wide=wide,
    )
    device.launch(FP8_DEQUANTIZE, (cuda_type(out.dtype),), row_config(out.shape[0], columns), params)
