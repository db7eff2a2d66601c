"""Random weights."""

from __future__ import annotations

from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import Float32, Int64, OutT, Uint64
from tessera.engine.ops.cuda.types import cuda_type, flat_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor


class FillNormalParams(NamedTuple):
    out: OutT
    size: Int64
    mean: Float32
    deviation: Float32
    seed: Uint64


FILL_NORMAL = KernelSpec(
    file="sampling/random.cu",
    name="fill_normal_kernel",
    template=("T",),
    params=FillNormalParams,
)
SPECS = (FILL_NORMAL,)

PHILOX_WORDS = Constant(4, "elements that a thread makes")
declare_header("random", __name__, {"PHILOX_WORDS": PHILOX_WORDS}, (FillNormalParams,))
SEED_MASK = 2**64 - 1


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    return [(FILL_NORMAL, (dtype,)) for dtype in dtypes]


class RandomOps(Ops):
    device: CudaDevice

    def _fill_normal(self, out: Tensor, mean: float, std: float, seed: int) -> None:
        config = flat_config(out.size, PHILOX_WORDS)
        params = FillNormalParams(out=out, size=out.size, mean=mean, deviation=std, seed=seed & SEED_MASK)
        self.device.launch(FILL_NORMAL, (cuda_type(out.dtype),), config, params)
