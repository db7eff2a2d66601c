"""RMSNorm and LayerNorm."""

from __future__ import annotations

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.ops.cuda.types import CHUNK, aligned, cuda_type, row_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor

RMSNORM = KernelSpec(
    file="norm/rmsnorm.cu",
    name="rmsnorm_kernel",
    template=("T", "WHOLE"),
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
    file="norm/layernorm.cu",
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

# As in cuda_src/norm/rmsnorm.cu.
MAX_ROW_THREADS = 512
ROW_CHUNKS = 4  # of CHUNK elements, that a thread keeps


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    whole = [(RMSNORM, (dtype, flag)) for dtype in dtypes for flag in ("true", "false")]
    return whole + [(LAYERNORM, (dtype,)) for dtype in dtypes]


class NormOps(Ops):
    device: CudaDevice

    def _rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        whole = hidden % CHUNK == 0 and aligned(16, x, weight, out)
        template = (cuda_type(x.dtype), "true" if whole else "false")
        config = row_config(rows, hidden, CHUNK * ROW_CHUNKS, MAX_ROW_THREADS)
        self.device.launch(RMSNORM, template, config, x, weight, out, hidden, eps)

    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        config = row_config(rows, hidden)
        self.device.launch(LAYERNORM, (cuda_type(x.dtype),), config, x, weight, bias, out, hidden, eps)
