"""RMSNorm and LayerNorm."""

from __future__ import annotations

from engine.cuda.device import CudaDevice
from engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from engine.ops.cuda.types import CHUNK, WARP_SIZE, ceil_div, cuda_type, row_config
from engine.ops.interface import Ops
from engine.tensor import Tensor

RMSNORM = KernelSpec(
    file="rmsnorm.cu",
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

MAX_ROW_THREADS = 512
ROW_CHUNKS = 4  # of CHUNK elements, that a thread of rmsnorm_kernel keeps
ALIGNMENT = 16  # bytes


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    whole = [(RMSNORM, (dtype, flag)) for dtype in dtypes for flag in ("true", "false")]
    return whole + [(LAYERNORM, (dtype,)) for dtype in dtypes]


def rmsnorm_config(rows: int, hidden: int) -> LaunchConfig:
    """One block a row, of a size that depends on the width alone, so that a row's sums never depend on the batch."""
    warps = ceil_div(ceil_div(hidden, CHUNK * ROW_CHUNKS), WARP_SIZE)
    return LaunchConfig((rows, 1, 1), (min(warps * WARP_SIZE, MAX_ROW_THREADS), 1, 1))


class NormOps(Ops):
    device: CudaDevice

    def _rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        whole = hidden % CHUNK == 0 and (x.pointer | weight.pointer | out.pointer) % ALIGNMENT == 0
        template = (cuda_type(x.dtype), "true" if whole else "false")
        self.device.launch(RMSNORM, template, rmsnorm_config(rows, hidden), x, weight, out, hidden, eps)

    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        config = row_config(rows, hidden)
        self.device.launch(LAYERNORM, (cuda_type(x.dtype),), config, x, weight, bias, out, hidden, eps)
