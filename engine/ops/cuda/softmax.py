"""Softmax and its logarithm, row by row."""

from __future__ import annotations

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.ops.cuda.types import cuda_type, row_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor

SOFTMAX = KernelSpec(
    file="elementwise/softmax.cu",
    name="softmax_kernel",
    template=("T", "LOG"),
    parameters=(("x", "pointer"), ("out", "pointer"), ("width", "int32")),
)
SPECS = (SOFTMAX,)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types, and for the logits' float."""
    return [(SOFTMAX, (dtype, log)) for dtype in dict.fromkeys(("float", *dtypes)) for log in ("true", "false")]


class SoftmaxOps(Ops):
    device: CudaDevice

    def _softmax(self, x: Tensor, log: bool, out: Tensor) -> None:
        rows, width = x.shape
        template = (cuda_type(x.dtype), "true" if log else "false")
        self.device.launch(SOFTMAX, template, row_config(rows, width), x, out, width)
