"""Backward of norms, activations and softmax."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import Float32, InFloat, InT, Int32, Int64, OutFloat, OutT
from tessera.engine.ops.cuda.training.elementwise import rows_config
from tessera.engine.ops.cuda.training.sums import sum_columns
from tessera.engine.ops.cuda.types import cuda_type, flat_config, row_config
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, empty, float32

ACTIVATION_FILE = "training/activation.cu"


class NormGradientParams(NamedTuple):
    dy: InT
    x: InT
    weight: InT
    out: OutT
    statistics: OutFloat
    hidden: Int32
    eps: Float32


class SiluParams(NamedTuple):
    x: InT
    out: OutT
    size: Int64


class SlopeParams(NamedTuple):
    dy: InT
    x: InT
    out: OutT
    size: Int64


class GatedGradientParams(NamedTuple):
    dy: InT
    gate_up: InT
    out: OutT
    inner: Int32


class SoftmaxGradientParams(NamedTuple):
    dy: InFloat
    y: InFloat
    out: OutFloat
    width: Int32


NORM_GRADIENT = KernelSpec(
    "training/norm.cu", "norm_gradient_kernel", ("T", "CENTRED"), NormGradientParams, on_demand=True
)
SILU = KernelSpec(ACTIVATION_FILE, "silu_kernel", ("T",), SiluParams, on_demand=True)
SILU_GRADIENT = KernelSpec(ACTIVATION_FILE, "silu_gradient_kernel", ("T",), SlopeParams, on_demand=True)
GELU_GRADIENT = KernelSpec(ACTIVATION_FILE, "gelu_gradient_kernel", ("T", "TANH"), SlopeParams, on_demand=True)
SILU_MUL_GRADIENT = KernelSpec(ACTIVATION_FILE, "silu_mul_gradient_kernel", ("T",), GatedGradientParams, on_demand=True)
GELU_MUL_GRADIENT = KernelSpec(
    ACTIVATION_FILE, "gelu_mul_gradient_kernel", ("T", "TANH"), GatedGradientParams, on_demand=True
)
SOFTMAX_GRADIENT = KernelSpec(
    "training/softmax.cu", "softmax_gradient_kernel", ("LOG",), SoftmaxGradientParams, on_demand=True
)
FLAGGED = (NORM_GRADIENT, GELU_GRADIENT, GELU_MUL_GRADIENT)
PLAIN = (SILU, SILU_GRADIENT, SILU_MUL_GRADIENT)
SPECS = (*FLAGGED, *PLAIN, SOFTMAX_GRADIENT)
declare_header("training_norm", __name__, params=(NormGradientParams,))
declare_header("training_activation", __name__, params=(SiluParams, SlopeParams, GatedGradientParams))

FLAGS = ("true", "false")


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types; softmax is of floats."""
    pairs: list[Instantiation] = [(spec, (dtype, flag)) for spec in FLAGGED for dtype in dtypes for flag in FLAGS]
    pairs += [(spec, (dtype,)) for spec in PLAIN for dtype in dtypes]
    return pairs + [(SOFTMAX_GRADIENT, (flag,)) for flag in FLAGS]


def _flag(value: bool) -> str:
    return "true" if value else "false"


class LayerOps(TrainingOps):
    device: CudaDevice

    def _rmsnorm_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, eps: float, weight_gradient: Tensor | None, out: Tensor
    ) -> None:
        self._norm_gradient(dy, x, weight, eps, weight_gradient, out, centred=False)

    def _layernorm_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor, eps: float, weight_gradient: Tensor | None, out: Tensor
    ) -> None:
        self._norm_gradient(dy, x, weight, eps, weight_gradient, out, centred=True)

    def _norm_gradient(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float,
        weight_gradient: Tensor | None,
        out: Tensor,
        *,
        centred: bool,
    ) -> None:
        rows, hidden = x.shape
        statistics = None if weight_gradient is None else empty((rows, 2), float32, self.device)
        params = NormGradientParams(dy=dy, x=x, weight=weight, out=out, statistics=statistics, hidden=hidden, eps=eps)
        template = (cuda_type(x.dtype), _flag(centred))
        self.device.launch(NORM_GRADIENT, template, row_config(rows, hidden), params)
        if weight_gradient is not None:
            sum_columns(self.device, dy, weight_gradient, accumulate=True, of=x, statistics=statistics)

    def _silu(self, x: Tensor, out: Tensor) -> None:
        params = SiluParams(x=x, out=out, size=x.size)
        self.device.launch(SILU, (cuda_type(x.dtype),), flat_config(x.size), params)

    def _silu_gradient(self, dy: Tensor, x: Tensor, out: Tensor) -> None:
        params = SlopeParams(dy=dy, x=x, out=out, size=x.size)
        self.device.launch(SILU_GRADIENT, (cuda_type(x.dtype),), flat_config(x.size), params)

    def _gelu_gradient(self, dy: Tensor, x: Tensor, tanh: bool, out: Tensor) -> None:
        params = SlopeParams(dy=dy, x=x, out=out, size=x.size)
        self.device.launch(GELU_GRADIENT, (cuda_type(x.dtype), _flag(tanh)), flat_config(x.size), params)

    def _silu_mul_gradient(self, dy: Tensor, gate_up: Tensor, out: Tensor) -> None:
        params = GatedGradientParams(dy=dy, gate_up=gate_up, out=out, inner=dy.shape[1])
        self.device.launch(SILU_MUL_GRADIENT, (cuda_type(dy.dtype),), rows_config(*dy.shape), params)

    def _gelu_mul_gradient(self, dy: Tensor, gate_up: Tensor, tanh: bool, out: Tensor) -> None:
        params = GatedGradientParams(dy=dy, gate_up=gate_up, out=out, inner=dy.shape[1])
        self.device.launch(GELU_MUL_GRADIENT, (cuda_type(dy.dtype), _flag(tanh)), rows_config(*dy.shape), params)

    def _softmax_gradient(self, dy: Tensor, y: Tensor, log: bool, out: Tensor) -> None:
        params = SoftmaxGradientParams(dy=dy, y=y, out=out, width=y.shape[1])
        self.device.launch(SOFTMAX_GRADIENT, (_flag(log),), row_config(*y.shape), params)
