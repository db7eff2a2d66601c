"""The matrix product of a decode step: which variant of `matmul_decode_kernel` runs, and on how many blocks.

A row's result does not depend on the other rows, nor on which of these variants computes it: every sum
runs over the same eight interleaved parts of k in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from engine.ops.cuda.types import WARP_SIZE, ceil_div

MATMUL_DECODE = KernelSpec(
    file="matmul_decode.cu",
    name="matmul_decode_kernel",
    template=("T", "Out", "TOKENS", "UNITS", "STAGES", "HELD"),
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
        held: steps of x that a warp keeps in registers, which a norm needs; 0 if x is streamed.
    """

    tokens: int
    units: int
    stages: int
    held: int

    def template(self, dtype: str, out_dtype: str) -> tuple[str, ...]:
        return (dtype, out_dtype, *map(str, (self.tokens, self.units, self.stages, self.held)))

    @property
    def shared_bytes(self) -> int:
        groups = self.tokens // 8
        loads = 2 * (self.units + (0 if self.held else groups))
        ring = self.stages * loads * THREADS * SEGMENT_BYTES
        partial = WARPS * self.units * groups * WARP_SIZE * 8
        return ring + partial + self.held * WARPS * STEP_K * HALF_BYTES

    def config(self, features: int, blocks: int) -> LaunchConfig:
        """`features` of the result; as many blocks, unless there are fewer units of 8 features."""
        return LaunchConfig((min(blocks, ceil_div(features, UNIT)), 1, 1), (THREADS, 1, 1), self.shared_bytes)


MAX_ROWS = 16

TILES = tuple(
    DecodeTile(tokens, units, stages, held)
    for tokens, helds in ((8, (2, 4, 6, 8)), (16, (2, 4)))
    for units, stages in ((1, 6), (2, 4), (4, 2))
    for held in (0, *helds)
)


def held_steps(in_features: int) -> int:
    return ceil_div(in_features, STEP_K * WARPS * 2) * 2


@lru_cache(maxsize=4096)
def choose_decode_tile(
    num_rows: int, features: int, in_features: int, multiprocessors: int, *, gated: bool, normed: bool, logits: bool
) -> DecodeTile | None:
    """The variant for this product, None where other kernels are faster or needed."""
    if num_rows > MAX_ROWS:
        return None
    tokens = 8 if num_rows <= 8 else 16
    held = held_steps(in_features)
    if held > (8 if tokens == 8 else 4):
        held = 0
    if normed and not held:
        return None
    units = ceil_div(ceil_div(features, UNIT), multiprocessors) * (1 + gated)
    fitting = [tile for tile in TILES if tile.tokens == tokens and tile.held == held]
    return next((tile for tile in fitting if tile.units >= units), fitting[-1])


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    return [
        (MATMUL_DECODE, tile.template(dtype, out_dtype))
        for dtype in dtypes
        if dtype != "float"
        for out_dtype in (dtype, "float")
        for tile in TILES
    ]
