"""The matrix product of a decode step: which variant of `matmul_decode_kernel` runs, and on how many blocks.

A row's result does not depend on the other rows, nor on which of these variants computes it: every sum
runs over the same eight interleaved parts of k in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from engine.ops.cuda.types import WARP_SIZE, ceil_div

MATMUL_DECODE = KernelSpec(
    file="matmul_decode.cu",
    name="matmul_decode_kernel",
    template=("T", "Out", "TOKENS", "UNITS", "STAGES", "RESIDENT"),
    parameters=(
        ("x", "pointer"),
        ("norm", "pointer"),
        ("weight", "pointer"),
        ("bias", "pointer"),
        ("out", "pointer"),
        ("num_rows", "int32"),
        ("out_features", "int32"),
        ("in_features", "int32"),
        ("eps", "float32"),
        ("accumulate", "int32"),
        ("gated", "int32"),
    ),
    overlaps=True,
)

# As in cuda_src/matmul_decode.cu.
WARPS = 8
THREADS = WARPS * WARP_SIZE
UNIT = 8
STEP_K = 64

SEGMENT_BYTES = 16
HALF_BYTES = 2


@dataclass(frozen=True)
class DecodeTile:
    """A variant of the kernel.

    Attributes:
        tokens: the most rows of x.
        units: of 8 weight rows that a block takes at a time.
        stages: of the ring of copies.
        resident: whether a block keeps all of x in shared memory, which a norm needs; else x is streamed.
    """

    tokens: int
    units: int
    stages: int
    resident: bool

    def template(self, dtype: str, out_dtype: str) -> tuple[str, ...]:
        sizes = (self.tokens, self.units, self.stages)
        return (dtype, out_dtype, *map(str, sizes), "true" if self.resident else "false")

    def shared_bytes(self, num_rows: int, in_features: int, *, normed: bool) -> int:
        groups = ceil_div(self.tokens, 8)
        loads = 2 * (self.units + (0 if self.resident else groups))
        ring = self.stages * loads * THREADS * SEGMENT_BYTES
        partial = WARPS * self.units * groups * WARP_SIZE * 8
        row = ceil_div(in_features, STEP_K * WARPS) * STEP_K * WARPS * HALF_BYTES
        return ring + partial + ((num_rows + normed) * row if self.resident else 0)

    def config(
        self, num_rows: int, features: int, in_features: int, blocks: int, *, normed: bool = False
    ) -> LaunchConfig:
        """`features` of the result; as many blocks, unless there are fewer units of 8 features."""
        shared_bytes = self.shared_bytes(num_rows, in_features, normed=normed)
        return LaunchConfig((min(blocks, ceil_div(features, UNIT)), 1, 1), (THREADS, 1, 1), shared_bytes)


MAX_ROWS = 16
RESIDENT_BYTES = 34 << 10  # the most of x and norm that a block keeps

# Units and stages: a ring of 32 to 96 KiB, which fills while the kernel before still runs.
TOKENS = (1, 8, 16)
SIZES = ((1, 6), (4, 2), (6, 2))
TILES = tuple(DecodeTile(tokens, *size, resident) for tokens in TOKENS for size in SIZES for resident in (True, False))
LOGITS_TILES = tuple(tile for tile in TILES if tile.units > 1)


class Limits(NamedTuple):
    """What a device has: its multiprocessors, and the shared memory a block may use."""

    multiprocessors: int
    shared_bytes: int


@lru_cache(maxsize=4096)
def choose_decode_tile(
    num_rows: int, features: int, in_features: int, limits: Limits, *, gated: bool, normed: bool, logits: bool
) -> DecodeTile | None:
    """The variant for a result [num_rows, features], None where this kernel is not for it."""
    if num_rows > MAX_ROWS or (normed and (num_rows + 1) * in_features * HALF_BYTES > RESIDENT_BYTES):
        return None
    tokens = next(tokens for tokens in TOKENS if tokens >= num_rows)
    fitting = [
        tile
        for tile in (LOGITS_TILES if logits else TILES)
        if tile.tokens == tokens and tile.resident == normed and tile.units > gated
        if tile.shared_bytes(num_rows, in_features, normed=normed) <= limits.shared_bytes
    ]
    units = ceil_div(ceil_div(features, UNIT), limits.multiprocessors) * (1 + gated)
    return next((tile for tile in fitting if tile.units >= units), fitting[-1] if fitting else None)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    halves = [dtype for dtype in dtypes if dtype != "float"]
    pairs = [(MATMUL_DECODE, tile.template(dtype, dtype)) for dtype in halves for tile in TILES]
    return pairs + [(MATMUL_DECODE, tile.template(dtype, "float")) for dtype in halves for tile in LOGITS_TILES]
