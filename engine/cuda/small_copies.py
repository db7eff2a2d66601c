"""Small copies between the device and page-locked memory, made by multiprocessors.

A DMA engine may take the copies of one direction one after the other, whatever their streams: a step's inputs, of a few
KiB, would wait for all KV blocks that were submitted before, 20 ms for a GiB. A kernel's accesses do not queue there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, NamedTuple

from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import Int64, Pointer

COPY_THREADS = 256
PIECES = Constant(4, "that a thread has on the bus at a time")
PIECE_TYPES = {16: "uint4", 4: "unsigned", 1: "unsigned char"}  # by size


class CopyBytesParams(NamedTuple):
    source: Annotated[Pointer, "const unsigned char*"]
    target: Annotated[Pointer, "unsigned char*"]
    size: Int64


COPY_BYTES = KernelSpec(
    file="elementwise/copy_bytes.cu",
    name="copy_bytes_kernel",
    template=("Piece",),
    params=CopyBytesParams,
)
SPECS = (COPY_BYTES,)
declare_header("copy_bytes", __name__, {"PIECES": PIECES}, params=(CopyBytesParams,))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched, whatever the dtypes."""
    return [(COPY_BYTES, (piece,)) for piece in PIECE_TYPES.values()]


def piece_bytes(*pointers: int) -> int:
    """The largest piece that can be read and written at these addresses."""
    together = 0
    for pointer in pointers:
        together |= pointer
    return next(size for size in PIECE_TYPES if not together % size)


@lru_cache(maxsize=4096)
def copy_config(nbytes: int, piece: int) -> LaunchConfig:
    """Blocks that cover `nbytes`, at least one byte."""
    return LaunchConfig((-(-nbytes // (COPY_THREADS * PIECES * piece)), 1, 1), (COPY_THREADS, 1, 1))
