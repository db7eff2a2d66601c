"""SiLU times gate, GELU and ReLU."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InT, Int32, Int64, OutT
from tessera.engine.ops.cuda.types import CHUNK, FLAT_BLOCK, MAX_CACHED_CONFIGS, ceil_div, cuda_type, flat_config
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.layer_interface import SWIGLU_ALPHA, SWIGLU_LIMIT
from tessera.engine.tensor import Tensor


class GatedParams(NamedTuple):
    gate_up: InT
    out: OutT
    inner: Int32


class GeluParams(NamedTuple):
    x: InT
    out: OutT
    size: Int64


SILU_MUL = KernelSpec(
    file="elementwise/activation.cu",
    name="silu_mul_kernel",
    template=("T",),
    params=GatedParams,
    overlaps=True,
)
CLAMPED_SWIGLU_MUL = KernelSpec(
    file="elementwise/activation.cu",
    name="clamped_swiglu_mul_kernel",
    template=("T",),
    params=GatedParams,
    overlaps=True,
)
GELU_MUL = KernelSpec(
    file="elementwise/activation.cu",
    name="gelu_mul_kernel",
    template=("T", "TANH"),
    params=GatedParams,
    overlaps=True,
)
GELU = KernelSpec(
    file="elementwise/activation.cu",
    name="gelu_kernel",
    template=("T", "TANH"),
    params=GeluParams,
    overlaps=True,
)
RELU = KernelSpec(
    file="elementwise/activation.cu",
    name="relu_kernel",
    template=("T", "SQUARED"),
    params=GeluParams,
    on_demand=True,
)
SPECS = (SILU_MUL, CLAMPED_SWIGLU_MUL, GELU_MUL, GELU, RELU)
declare_header(
    "swiglu",
    __name__,
    declarations=f"constexpr float SWIGLU_ALPHA = {SWIGLU_ALPHA}f, SWIGLU_LIMIT = {SWIGLU_LIMIT}f;\n",
)
declare_header("activation", __name__, params=(GatedParams, GeluParams))


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def silu_mul_config(rows: int, inner: int) -> LaunchConfig:
    """A row's blocks along y, so that one row alone still spreads over the device."""
    return LaunchConfig((rows, ceil_div(inner, FLAT_BLOCK * CHUNK), 1), (FLAT_BLOCK, 1, 1))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    silu_mul: list[Instantiation] = [(spec, (dtype,)) for spec in (SILU_MUL, CLAMPED_SWIGLU_MUL) for dtype in dtypes]
    forms = [(dtype, tanh) for dtype in dtypes for tanh in ("true", "false")]
    return silu_mul + [(spec, form) for spec in (GELU_MUL, GELU, RELU) for form in forms]


class ActivationOps(Ops):
    device: CudaDevice

    def _silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        rows, inner = out.shape
        params = GatedParams(gate_up=gate_up, out=out, inner=inner)
        self.device.launch(SILU_MUL, (cuda_type(out.dtype),), silu_mul_config(rows, inner), params)

    def _clamped_swiglu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        rows, inner = out.shape
        params = GatedParams(gate_up=gate_up, out=out, inner=inner)
        self.device.launch(CLAMPED_SWIGLU_MUL, (cuda_type(out.dtype),), silu_mul_config(rows, inner), params)

    def _gelu_mul(self, gate_up: Tensor, tanh: bool, out: Tensor) -> None:
        rows, inner = out.shape
        template = (cuda_type(out.dtype), "true" if tanh else "false")
        params = GatedParams(gate_up=gate_up, out=out, inner=inner)
        self.device.launch(GELU_MUL, template, silu_mul_config(rows, inner), params)

    def _gelu(self, x: Tensor, tanh: bool, out: Tensor) -> None:
        template = (cuda_type(x.dtype), "true" if tanh else "false")
        self.device.launch(GELU, template, flat_config(x.size), GeluParams(x=x, out=out, size=x.size))

    def _relu(self, x: Tensor, squared: bool, out: Tensor) -> None:
        template = (cuda_type(x.dtype), "true" if squared else "false")
        self.device.launch(RELU, template, flat_config(x.size), GeluParams(x=x, out=out, size=x.size))
