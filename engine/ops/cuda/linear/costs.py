"""Measured constants that the choices of matrix products rest on, by device.

Another device may have an entry of its own in DEVICES; one that has none takes DEFAULT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tessera.engine.cuda.device import CudaDevice

TileSize = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Sm90Costs:
    """Of the kernels of sm_90a; a plan's time is what `Plan.cost` makes of them.

    Attributes:
        step_us: by (warp groups along the rows, columns of one), of 64 elements along k where all multiprocessors
            are at it.
        weight_bytes_per_us: reading the weight.
        overlap: share of the shorter one of reading and multiplying that the longer one does not hide.
        store_us: a tile of 128 x 256 results.
        join_us, join_area_us: where blocks share a tile's k: of any tile, and of one of 128 x 64.
        min_rows: from which on these kernels are as fast as the portable ones or faster.
        min_rows_where_ahead: the same for gated products, logits and results of `ahead_features`.
        ahead_features: of the result for each multiprocessor, from and to.
        min_sharing_rows: from which on pairs of blocks share weight tiles.
        min_wide_rows: from which on tiles of three warp groups may be chosen.
    """

    step_us: Mapping[TileSize, float]
    weight_bytes_per_us: float
    overlap: float
    store_us: float
    join_us: float
    join_area_us: float
    min_rows: int
    min_rows_where_ahead: int
    ahead_features: tuple[int, int]
    min_sharing_rows: int
    min_wide_rows: int


@dataclass(frozen=True, eq=False)
class PortableCosts:
    """Of the kernels of all architectures.

    Attributes:
        tile_speeds: by (rows, columns), of a tile's arithmetic on a full multiprocessor, relative to the others'.
        few_rows: up to which a product is bound by reading the weight and blocks may share a tile.
        wide_features: for each multiprocessor, beyond which a wider tile is taken: up to 32 rows, and beyond.
        blocks_sharing: for each multiprocessor, up to which more blocks share a tile: up to 32 rows, and beyond.
        gemv_warps: for each multiprocessor, beyond which more warps an output bring nothing.
        slim_features: for each multiprocessor, up to which products in order take slim tiles, of `slim_rows`, from and
            to.
    """

    tile_speeds: Mapping[TileSize, float]
    few_rows: int
    wide_features: tuple[int, int]
    blocks_sharing: tuple[int, int]
    gemv_warps: int
    slim_features: int
    slim_rows: tuple[int, int]


@dataclass(frozen=True, eq=False)
class LinearCosts:
    sm90: Sm90Costs
    portable: PortableCosts


# Of sm_90a's plans fitted to measurements of all of them on the shapes of Llama 8B and Qwen3 0.6B with 64 to 8192 rows:
# what they choose is within 1 % of the best on average and 5 % at worst, also of 256 to 2048 rows without rests, where
# power bounds the clock. With 17 to 32 rows gated products take 4 to 20 % less time than by the portable kernels, which
# leave the activation to another one, results of 3,072 or 4,096 features 6 to 29 % less, logits a little less; results
# of 1,024 to 2,560, 5,120 or 6,144 features up to 25 % more.
H200 = LinearCosts(
    Sm90Costs(
        step_us={
            (2, 256): 0.63,
            (2, 224): 0.57,
            (2, 192): 0.49,
            (2, 128): 0.35,
            (2, 96): 0.30,
            (2, 64): 0.22,
            (1, 64): 0.25,
            (1, 32): 0.24,
            (3, 256): 0.88,  # 7 % less than one and a half of the first
        },
        weight_bytes_per_us=3.4e6,
        overlap=0.15,
        store_us=1.84,
        join_us=1.1,
        join_area_us=1.2,
        min_rows=33,
        min_rows_where_ahead=17,
        ahead_features=(23, 32),
        min_sharing_rows=1024,
        min_wide_rows=1280,
    ),
    PortableCosts(
        tile_speeds={
            (128, 256): 1.0,
            (128, 128): 0.9,
            (64, 64): 0.6,
            (64, 128): 0.6,
            (64, 32): 0.4,
            (32, 64): 0.35,
            (32, 32): 0.25,
        },
        few_rows=64,
        wide_features=(120, 40),
        blocks_sharing=(3, 2),
        gemv_warps=32,
        slim_features=8,
        slim_rows=(33, 64),
    ),
)
DEFAULT = H200
DEVICES: dict[str, LinearCosts] = {"NVIDIA H200": H200}


def costs_of(device: CudaDevice) -> LinearCosts:
    """By the name that the driver gives the device."""
    return DEVICES.get(device.device_name, DEFAULT)
