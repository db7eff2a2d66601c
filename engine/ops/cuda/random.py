"""Random weights."""

from __future__ import annotations

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.ops.cuda.types import cuda_type, flat_config
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor

FILL_NORMAL = KernelSpec(
    file="sampling/random.cu",
    name="fill_normal_kernel",
    template=("T",),
    parameters=(
        ("out", "pointer"),
        ("size", "int64"),
        ("mean", "float32"),
        ("deviation", "float32"),
        ("seed", "uint64"),
    ),
)
SPECS = (FILL_NORMAL,)

PHILOX_WORDS = 4  # elements a thread makes
SEED_MASK = 2**64 - 1


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    return [(FILL_NORMAL, (dtype,)) for dtype in dtypes]


class RandomOps(Ops):
    device: CudaDevice

    def _fill_normal(self, out: Tensor, mean: float, std: float, seed: int) -> None:
        config = flat_config(out.size, PHILOX_WORDS)
        self.device.launch(FILL_NORMAL, (cuda_type(out.dtype),), config, out, out.size, mean, std, seed & SEED_MASK)
