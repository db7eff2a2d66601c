"""Which tensor-core instructions add in the same order: `python -m tests.bench.tensor_core_sums` on an sm_90a device.

What a rule about the order of sums can rest on: a table of the share of results in which two ways differ, for random
numbers and for such as cancel, and of their largest differences relative to the sum of magnitudes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InT, Int32, OutFloat
from tessera.engine.ops.cuda.types import cuda_type
from tessera.engine.tensor import bfloat16, empty, float16, float32, from_numpy

WAYS = (
    "wgmma",
    "wgmma exchanged",
    "mma",
    "mma exchanged",
    "mma, k16 permuted",
    "mma, k32 mixed",
    "mma, zeros after",
    "mma, k16 reversed",
)
SIZE = 64


class TensorCoreSumsParams(NamedTuple):
    a: InT
    b: InT
    out: OutFloat
    k: Int32


SUMS = KernelSpec(
    file="../tests/bench/tensor_core_sums.cu",
    name="tensor_core_sums_kernel",
    template=("T", "WAY"),
    params=TensorCoreSumsParams,
    min_arch=90,
    arch_specific=True,
)
declare_header("tensor_core_sums", __name__, params=(TensorCoreSumsParams,))


def numbers(kind: str, k: int, dtype: np.dtype[Any], rng: np.random.Generator) -> Any:
    values = rng.standard_normal((SIZE, k))
    if kind == "wide":
        values *= 2.0 ** rng.integers(-8, 9, values.shape)
    return values.astype(dtype)


def main() -> None:
    device = CudaDevice(0)
    rng = np.random.default_rng(7)
    print(f"{'':24}" + "".join(f"{way:>19}" for way in WAYS))
    for dtype in (bfloat16, float16):
        for kind in ("normal", "wide"):
            for k in (64, 1024):
                a, b = (numbers(kind, k, dtype, rng) for _ in range(2))
                results = [_sums(device, a, b, dtype, way) for way in range(len(WAYS))]
                sizes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
                cells = []
                for result in results:
                    differ = (result.view(np.uint32) != results[0].view(np.uint32)).mean()
                    far = np.log2(max((np.abs(result.astype(np.float64) - results[0]) / sizes).max(), 2.0**-99))
                    cells.append(f"{differ:>9.1%} 2^{far:<6.1f}" if differ else f"{'equal':>19}")
                print(f"{dtype!s:10}{kind:8}k={k:<6}" + "".join(f"{cell:>19}" for cell in cells), flush=True)


def _sums(device: CudaDevice, a: Any, b: Any, dtype: np.dtype[Any], way: int) -> Any:
    out = empty((SIZE, SIZE), float32, device)
    params = TensorCoreSumsParams(from_numpy(a, device), from_numpy(b, device), out, a.shape[1])
    device.launch(SUMS, (cuda_type(dtype), str(way)), LaunchConfig((1, 1, 1), (128, 1, 1), 4 * SIZE * SIZE), params)
    return out.numpy()


if __name__ == "__main__":
    main()
