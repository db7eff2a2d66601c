"""RMSNorm and LayerNorm."""

from __future__ import annotations

from engine.cuda.device import CudaDevice
from engine.cuda.kernel import Instantiation, KernelSpec
from engine.ops.cuda.types import cuda_type, row_config
from engine.ops.interface import Ops
from engine.tensor import Tensor

RMSNORM = KernelSpec(
    file="rmsnorm.cu",
    name="rmsnorm_kernel",
    template=("T",),
    parameters=(
        ("x", "pointer"),
        ("weight", "pointer"),
        ("out", "pointer"),
        ("hidden", "int32"),
        ("eps", "float32"),
    ),
    overlaps=True,
)
LAYERNORM = KernelSpec(
    file="layernorm.cu",
    name="layernorm_kernel",
    template=("T",),
    parameters=(
        ("x", "pointer"),
        ("weight", "pointer"),
        ("bias", "pointer"),
        ("out", "pointer"),
        ("hidden", "int32"),
        ("eps", "float32"),
    ),
)
SPECS = (RMSNORM, LAYERNORM)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    return [(spec, (dtype,)) for spec in SPECS for dtype in dtypes]


class NormOps(Ops):
    device: CudaDevice

    def _rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        self.device.launch(RMSNORM, (cuda_type(x.dtype),), row_config(rows, hidden), x, weight, out, hidden, eps)

    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        config = row_config(rows, hidden)
        self.device.launch(LAYERNORM, (cuda_type(x.dtype),), config, x, weight, bias, out, hidden, eps)
