"""Softmax and its logarithm, row by row."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import InT, Int32, OutFloat
from tessera.engine.ops.cuda.types import cuda_type, row_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor


class SoftmaxParams(NamedTuple):
    x: InT
    out: OutFloat
    width: Int32


SOFTMAX = KernelSpec(
    file="elementwise/softmax.cu",
    name="softmax_kernel",
    template=("T", "LOG"),
    params=SoftmaxParams,
)
SPECS = (SOFTMAX,)
declare_header("softmax", __name__, params=(SoftmaxParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types, and for the logits' float."""
    return [(SOFTMAX, (dtype, log)) for dtype in dict.fromkeys(("float", *dtypes)) for log in ("true", "false")]


class SoftmaxOps(Ops):
    device: CudaDevice

    def _softmax(self, x: Tensor, log: bool, out: Tensor) -> None:
        rows, width = x.shape
        template = (cuda_type(x.dtype), "true" if log else "false")
        self.device.launch(SOFTMAX, template, row_config(rows, width), SoftmaxParams(x=x, out=out, width=width))
