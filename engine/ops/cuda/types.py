"""What all groups of CUDA operations share: C type names, alignment, and the two usual shapes of a launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tessera.engine.contract.errors import TesseraError
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import LaunchConfig
from tessera.engine.tensor import Tensor, bfloat16, float16, float32, uint8

C_TYPE_NAMES = {float32: "float", float16: "__half", bfloat16: "__nv_bfloat16"}

E4M3 = "unsigned char"  # of a KV cache

WARP_SIZE = Constant(32)
CHUNK = Constant(8, "elements that a thread of an elementwise or row kernel handles at a time")
SEGMENT = Constant(8, "2-byte elements of 16 bytes: what a lane copies, and a row of an 8x8 matrix")
WARPGROUP_SIZE = Constant(128, "threads")
NORM_THREADS = Constant(512, "of a row of an RMSNorm, at most")
NORM_CHUNKS = Constant(4, "of a row of an RMSNorm, that a thread keeps")
HALF_BYTES = 2
declare_header("common", __name__, {"WARP_SIZE": WARP_SIZE, "CHUNK": CHUNK})
declare_header("tensor_cores", __name__, {"SEGMENT": SEGMENT, "WARPGROUP_SIZE": WARPGROUP_SIZE})

FLAT_BLOCK = 256
MAX_BLOCK = 1024

MAX_CACHED_CONFIGS = 4096  # of a kind


def cuda_type(dtype: np.dtype[Any]) -> str:
    """The C name of a floating-point dtype; raises TesseraError for others."""
    try:
        return C_TYPE_NAMES[dtype]
    except KeyError:
        raise TesseraError(f"CUDA kernels compute in float32, float16 and bfloat16, not in {dtype}") from None


def cached_type(dtype: np.dtype[Any], cached: np.dtype[Any]) -> str:
    """The C name of the elements of a KV cache, bytes for e4m3, where activations have `dtype`."""
    return E4M3 if cached == uint8 else cuda_type(dtype)


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def flat_config(size: int, per_thread: int = CHUNK) -> LaunchConfig:
    """Threads that cover `size` elements, `per_thread` each."""
    return LaunchConfig((ceil_div(size, FLAT_BLOCK * per_thread), 1, 1), (FLAT_BLOCK, 1, 1))


@lru_cache(maxsize=MAX_CACHED_CONFIGS)
def row_config(rows: int, width: int, per_thread: int = CHUNK, max_threads: int = MAX_BLOCK) -> LaunchConfig:
    """One block a row; its size depends on the width alone, so that a row's sums never depend on the batch."""
    warps = ceil_div(ceil_div(width, per_thread), WARP_SIZE)
    return LaunchConfig((rows, 1, 1), (min(warps * WARP_SIZE, max_threads), 1, 1))


def rmsnorm_config(rows: int, hidden: int) -> LaunchConfig:
    """A norm inside of another kernel that adds in the same order asks for it, too."""
    return row_config(rows, hidden, CHUNK * NORM_CHUNKS, NORM_THREADS)


def aligned(nbytes: int, *tensors: Tensor | None) -> bool:
    """Whether each that there is begins at a multiple of `nbytes`."""
    return all(tensor.pointer % nbytes == 0 for tensor in tensors if tensor is not None)


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
