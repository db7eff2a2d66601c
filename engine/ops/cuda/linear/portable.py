"""The product of 16-bit elements on tensor cores of every architecture, with tiles of many sizes and split-K.

A row's result may differ in its last bits between the tiles that share a sum among warps (`warps_k` > 1) or blocks
(split-K) and the others, because they add in different orders; otherwise it does not depend on the other rows. Products
in order take neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InT, Int32, OutOut
from tessera.engine.ops.cuda.candidates import Candidate
from tessera.engine.ops.cuda.linear.costs import DEFAULT, PortableCosts, costs_of
from tessera.engine.ops.cuda.linear.problem import LINEAR, LinearOperands, LinearProblem
from tessera.engine.ops.cuda.types import HALF_BYTES, WARP_SIZE, ceil_div


class MatmulParams(NamedTuple):
    x: InT
    weight: InT
    bias: InT
    out: OutOut
    num_rows: Int32
    out_features: Int32
    in_features: Int32
    accumulate: Int32


MATMUL = KernelSpec(
    file="linear/matmul.cu",
    name="matmul_kernel",
    template=(
        "T",
        "Out",
        "TILE_M",
        "TILE_N",
        "TILE_K",
        "WARPS_M",
        "WARPS_N",
        "WARPS_K",
        "STAGES",
        "ALIGNED",
    ),
    params=MatmulParams,
    overlaps=True,
)
MATMUL_SPLIT = KernelSpec(
    file="linear/matmul.cu",
    name="matmul_split_kernel",
    template=(*MATMUL.template[:-1], "SPLITS"),
    params=MatmulParams,
    min_arch=90,
    overlaps=True,
)
# The same function, with tiles that only products in order take.
MATMUL_SLIM = replace(MATMUL, batch_invariant=True)
SPECS = (MATMUL, MATMUL_SPLIT, MATMUL_SLIM)
declare_header("matmul", __name__, params=(MatmulParams,))


@dataclass(frozen=True)
class Tile:
    """A choice of `matmul_kernel`'s sizes.

    Attributes:
        m, n, k: rows, columns and depth of what a block holds in shared memory.
        warps_m, warps_n, warps_k: how its warps divide these.
        stages: of the ring of copies.
    """

    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    warps_k: int
    stages: int

    def template(self, dtype: str, out_dtype: str, aligned: bool) -> tuple[str, ...]:
        sizes = (self.m, self.n, self.k, self.warps_m, self.warps_n, self.warps_k, self.stages)
        return (dtype, out_dtype, *map(str, sizes), "true" if aligned else "false")

    def split_template(self, dtype: str, splits: int) -> tuple[str, ...]:
        return (*self.template(dtype, dtype, aligned=True)[:-1], str(splits))

    def blocks(self, num_rows: int, out_features: int) -> int:
        return ceil_div(num_rows, self.m) * ceil_div(out_features, self.n)

    def config(self, num_rows: int, out_features: int, splits: int = 1) -> LaunchConfig:
        """`splits` blocks share a tile in `matmul_split_kernel`."""
        threads = WARP_SIZE * self.warps_m * self.warps_n * self.warps_k
        shared_bytes = self.stages * (self.m + self.n) * self.k * HALF_BYTES
        return LaunchConfig((self.blocks(num_rows, out_features) * splits, 1, 1), (threads, 1, 1), shared_bytes)


LARGE = Tile(128, 256, 32, warps_m=2, warps_n=4, warps_k=1, stages=4)
MEDIUM = Tile(128, 128, 32, warps_m=2, warps_n=2, warps_k=1, stages=4)
SMALL = Tile(64, 64, 64, warps_m=2, warps_n=2, warps_k=1, stages=4)
WIDE = Tile(64, 128, 64, warps_m=2, warps_n=4, warps_k=1, stages=4)
NARROW = Tile(64, 32, 128, warps_m=1, warps_n=1, warps_k=4, stages=3)
FLAT_WIDE = Tile(32, 64, 128, warps_m=1, warps_n=2, warps_k=4, stages=3)
FLAT_NARROW = Tile(32, 32, 128, warps_m=1, warps_n=1, warps_k=4, stages=4)

TILES = (LARGE, MEDIUM, SMALL, WIDE, NARROW, FLAT_WIDE, FLAT_NARROW)
LOGITS_TILES = (MEDIUM, SMALL, WIDE, NARROW, FLAT_WIDE)  # for float32 results of 16-bit inputs: few rows
UNALIGNED_TILE = SMALL
# In order, for results of few features: blocks have so few of them that no sum has to be shared to occupy the device.
SLIM_TILES = (
    Tile(32, 16, 128, warps_m=2, warps_n=1, warps_k=1, stages=6),
    Tile(64, 16, 128, warps_m=4, warps_n=1, warps_k=1, stages=5),
)
TILES_IN_ORDER = tuple(tile for tile in TILES if tile.warps_k == 1)
LOGITS_TILES_IN_ORDER = tuple(tile for tile in LOGITS_TILES if tile.warps_k == 1)
SPLITS = {NARROW: (2, 4), WIDE: (2, 4), FLAT_NARROW: (2, 4, 8)}  # blocks that may share a tile
SPLIT_CHOICES = tuple((tile, splits) for tile, choices in SPLITS.items() for splits in choices)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    pairs: list[Instantiation] = []
    for dtype in (dtype for dtype in dtypes if dtype != "float"):
        for out_dtype, tiles in ((dtype, TILES), ("float", LOGITS_TILES)):
            pairs += [(MATMUL, tile.template(dtype, out_dtype, aligned=True)) for tile in tiles]
            pairs.append((MATMUL, UNALIGNED_TILE.template(dtype, out_dtype, aligned=False)))
        pairs += [(MATMUL_SPLIT, tile.split_template(dtype, splits)) for tile, splits in SPLIT_CHOICES]
        pairs += [(MATMUL_SLIM, tile.template(dtype, dtype, aligned=True)) for tile in SLIM_TILES]
    return pairs


def choose_tile(
    num_rows: int,
    out_features: int,
    multiprocessors: int,
    tiles: tuple[Tile, ...] = TILES,
    costs: PortableCosts = DEFAULT.portable,
) -> Tile:
    """The tile whose busiest multiprocessor has the least to do."""

    def cost(tile: Tile) -> float:
        rounds = ceil_div(tile.blocks(num_rows, out_features), multiprocessors)
        return rounds * tile.m * tile.n / costs.tile_speeds[tile.m, tile.n]

    return min(tiles, key=cost)


def choose_split_tile(
    num_rows: int, out_features: int, multiprocessors: int, costs: PortableCosts = DEFAULT.portable
) -> tuple[Tile, int]:
    """For a few rows a tile and the blocks that share it: as many as give each multiprocessor a few."""
    flat = num_rows <= FLAT_NARROW.m
    beyond = 0 if flat else 1
    is_wide = out_features > costs.wide_features[beyond] * multiprocessors
    tile = (FLAT_WIDE if is_wide else FLAT_NARROW) if flat else (WIDE if is_wide else NARROW)
    most = costs.blocks_sharing[beyond] * multiprocessors
    blocks = tile.blocks(num_rows, out_features)
    return tile, max((splits for splits in SPLITS.get(tile, ()) if blocks * splits <= most), default=1)


def _few_rows_choice(problem: LinearProblem, device: CudaDevice) -> tuple[Tile, int] | None:
    """Where blocks may share a tile: on devices with clusters (sm_90 and later)."""
    costs = costs_of(device).portable
    may_split = problem.in_segments and problem.num_rows <= costs.few_rows and not problem.logits
    if not may_split or problem.in_order or device.compute_capability < (9, 0):
        return None
    return choose_split_tile(problem.num_rows, problem.features, device.multiprocessors, costs)


def _accepts(problem: LinearProblem, device: CudaDevice) -> Tile | None:
    if not problem.is_half or problem.normed or problem.gated:
        return None
    choice = _few_rows_choice(problem, device)
    if choice is not None:
        return choice[0]
    if not problem.in_segments:
        return UNALIGNED_TILE
    if problem.in_order:
        tiles = LOGITS_TILES_IN_ORDER if problem.logits else TILES_IN_ORDER
    else:
        tiles = LOGITS_TILES if problem.logits else TILES
    costs = costs_of(device).portable
    return choose_tile(problem.num_rows, problem.features, device.multiprocessors, tiles, costs)


def _accepts_split(problem: LinearProblem, device: CudaDevice) -> tuple[Tile, int] | None:
    if not problem.is_half or problem.normed or problem.gated:
        return None
    choice = _few_rows_choice(problem, device)
    return None if choice is None or choice[1] == 1 else choice


def _accepts_slim(problem: LinearProblem, device: CudaDevice) -> Tile | None:
    """Few features for every multiprocessor, and more rows than those that read the weight by warps of their own."""
    if not problem.in_order or not problem.is_half or problem.normed or problem.gated or problem.logits:
        return None
    costs = costs_of(device).portable
    if not problem.in_segments or problem.features > costs.slim_features * device.multiprocessors:
        return None
    if not costs.slim_rows[0] <= problem.num_rows <= costs.slim_rows[1]:
        return None
    return next((tile for tile in SLIM_TILES if tile.m >= problem.num_rows), None)


def _launch_slim(device: CudaDevice, problem: LinearProblem, tile: Tile, operands: LinearOperands) -> None:
    template = tile.template(problem.dtype, problem.out_dtype, aligned=True)
    config = tile.config(problem.num_rows, problem.features)
    device.launch(MATMUL_SLIM, template, config, _params(problem, operands))


def _params(problem: LinearProblem, operands: LinearOperands) -> MatmulParams:
    return MatmulParams(
        x=operands.x,
        weight=operands.weight,
        bias=operands.bias,
        out=operands.out,
        num_rows=problem.num_rows,
        out_features=problem.features,
        in_features=problem.in_features,
        accumulate=problem.accumulates,
    )


def _launch(device: CudaDevice, problem: LinearProblem, tile: Tile, operands: LinearOperands) -> None:
    template = tile.template(problem.dtype, problem.out_dtype, problem.in_segments)
    device.launch(MATMUL, template, tile.config(problem.num_rows, problem.features), _params(problem, operands))


def _launch_split(
    device: CudaDevice, problem: LinearProblem, choice: tuple[Tile, int], operands: LinearOperands
) -> None:
    tile, splits = choice
    config = tile.config(problem.num_rows, problem.features, splits)
    device.launch(MATMUL_SPLIT, tile.split_template(problem.dtype, splits), config, _params(problem, operands))


LINEAR.register(Candidate("slim", (MATMUL_SLIM,), _accepts_slim, _launch_slim, order=0))
LINEAR.register(Candidate("split_k", (MATMUL_SPLIT,), _accepts_split, _launch_split, order=3))
LINEAR.register(Candidate("portable", (MATMUL,), _accepts, _launch, order=4))
