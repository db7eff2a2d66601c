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


class LayernormParams(NamedTuple):
    x: InT
    weight: InT
    bias: InT
    out: OutT
    hidden: Int32
    eps: Float32


RMSNORM = KernelSpec(
    file="norm/rmsnorm.cu",
    name="rmsnorm_kernel",
    template=("T", "WHOLE"),
    params=RmsnormParams,
    overlaps=True,
)
LAYERNORM = KernelSpec(
    file="norm/layernorm.cu",
    name="layernorm_kernel",
    template=("T",),
    params=LayernormParams,
)
SPECS = (RMSNORM, LAYERNORM)

declare_header("rmsnorm", __name__, {"MAX_THREADS": NORM_THREADS, "ROW_CHUNKS": NORM_CHUNKS}, (RmsnormParams,))
declare_header("layernorm", __name__, params=(LayernormParams,))


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
        config = rmsnorm_config(rows, hidden)
        params = RmsnormParams(x=x, weight=weight, out=out, hidden=hidden, eps=eps)
        self.device.launch(RMSNORM, template, config, params)

    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        rows, hidden = x.shape
        config = row_config(rows, hidden)
        params = LayernormParams(x=x, weight=weight, bias=bias, out=out, hidden=hidden, eps=eps)
        self.device.launch(LAYERNORM, (cuda_type(x.dtype),), config, params)
