"""Matrix products: tensor cores for bfloat16 and float16, plain float32, and a kernel for a few rows.

A row's result may differ in its last bits between `matvec` (up to 4 rows in float32), `matmul_decode`
(up to 16 rows), the tiles that share a sum among warps (`warps_k` > 1) or blocks (`splits`) and the other
tiles, because they add in different orders; inside each of these groups it does not depend on the other
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cuda import matmul_decode
from tessera.engine.ops.cuda import sm90_matmul as matmul_hopper
from tessera.engine.ops.cuda.matmul_decode import MATMUL_DECODE, Limits, choose_decode_tile
from tessera.engine.ops.cuda.quant.dequantize import DequantizeOps
from tessera.engine.ops.cuda.sm90_matmul import launch_product
from tessera.engine.ops.cuda.types import WARP_SIZE, aligned, ceil_div, cuda_type
from tessera.engine.ops.linear_interface import Accumulate, Activate, Epilogue, LayerNorm, Prologue
from tessera.engine.tensor import Tensor, bfloat16, float32

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
    parameters=(
        ("x", "pointer"),
        ("weight", "pointer"),
        ("bias", "pointer"),
        ("out", "pointer"),
        ("num_rows", "int32"),
        ("out_features", "int32"),
        ("in_features", "int32"),
        ("accumulate", "int32"),
    ),
    overlaps=True,
)
MATMUL_SPLIT = KernelSpec(
    file="linear/matmul.cu",
    name="matmul_split_kernel",
    template=(*MATMUL.template[:-1], "SPLITS"),
    parameters=MATMUL.parameters,
    min_arch=90,
    overlaps=True,
)
MATMUL_FLOAT32 = KernelSpec(
    file="linear/matmul_float32.cu",
    name="matmul_float32_kernel",
    template=("TILE",),
    parameters=MATMUL.parameters,
)
MATVEC = KernelSpec(
    file="linear/gemv.cu",
    name="matvec_kernel",
    template=("T", "Out", "ROWS"),
    parameters=(*MATMUL.parameters, ("warps_per_output", "int32")),
)
SPECS = (MATMUL, MATMUL_SPLIT, MATMUL_FLOAT32, MATVEC, MATMUL_DECODE, *matmul_hopper.SPECS)


@dataclass(frozen=True)
class Tile:
    """A choice of `matmul_kernel`'s sizes.

    Attributes:
        m, n, k: rows, columns and depth of what a block holds in shared memory.
        warps_m, warps_n, warps_k: how its warps divide these.
        stages: of the ring of copies.
        speed: of its arithmetic on a full multiprocessor, relative to the others'.
    """

    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    warps_k: int
    stages: int
    speed: float

    def template(self, dtype: str, out_dtype: str, aligned: bool) -> tuple[str, ...]:
        sizes = (self.m, self.n, self.k, self.warps_m, self.warps_n, self.warps_k, self.stages)
        return (dtype, out_dtype, *map(str, sizes), "true" if aligned else "false")

    def blocks(self, num_rows: int, out_features: int) -> int:
        return ceil_div(num_rows, self.m) * ceil_div(out_features, self.n)

    def config(self, num_rows: int, out_features: int, splits: int = 1) -> LaunchConfig:
        """`splits` blocks share a tile in `matmul_split_kernel`."""
        threads = WARP_SIZE * self.warps_m * self.warps_n * self.warps_k
        shared_bytes = self.stages * (self.m + self.n) * self.k * HALF_BYTES
        return LaunchConfig((self.blocks(num_rows, out_features) * splits, 1, 1), (threads, 1, 1), shared_bytes)


HALF_BYTES = 2

LARGE = Tile(128, 256, 32, warps_m=2, warps_n=4, warps_k=1, stages=4, speed=1.0)
MEDIUM = Tile(128, 128, 32, warps_m=2, warps_n=2, warps_k=1, stages=4, speed=0.9)
SMALL = Tile(64, 64, 64, warps_m=2, warps_n=2, warps_k=1, stages=4, speed=0.6)
WIDE = Tile(64, 128, 64, warps_m=2, warps_n=4, warps_k=1, stages=4, speed=0.6)
NARROW = Tile(64, 32, 128, warps_m=1, warps_n=1, warps_k=4, stages=3, speed=0.4)
FLAT_WIDE = Tile(32, 64, 128, warps_m=1, warps_n=2, warps_k=4, stages=3, speed=0.35)
FLAT_NARROW = Tile(32, 32, 128, warps_m=1, warps_n=1, warps_k=4, stages=4, speed=0.25)

TILES = (LARGE, MEDIUM, SMALL, WIDE, NARROW, FLAT_WIDE, FLAT_NARROW)
LOGITS_TILES = (MEDIUM, SMALL, WIDE, NARROW, FLAT_WIDE)  # for float32 results of 16-bit inputs: few rows
UNALIGNED_TILE = SMALL
SPLITS = {NARROW: (2, 4), WIDE: (2, 4), FLAT_NARROW: (2, 4, 8)}  # blocks that may share a tile
SPLIT_CHOICES = tuple((tile, splits) for tile, choices in SPLITS.items() for splits in choices)

# Up to this many rows a product is bound by reading the weight, and tiles are chosen by measurement.
FEW_ROWS = 64

FLOAT32_TILES = (128, 64)
FLOAT32_THREADS = 256

MATVEC_ROWS = (1, 2, 4)
MATVEC_WARPS = 4
MATVEC_WARPS_PER_OUTPUT = (4, 2)
MATVEC_WARPS_PER_MULTIPROCESSOR = 32  # beyond these, more warps an output bring nothing


@lru_cache(maxsize=4096)
def choose_tile(num_rows: int, out_features: int, multiprocessors: int, tiles: tuple[Tile, ...] = TILES) -> Tile:
    """The tile whose busiest multiprocessor has the least to do."""

    def cost(tile: Tile) -> float:
        rounds = ceil_div(tile.blocks(num_rows, out_features), multiprocessors)
        return rounds * tile.m * tile.n / tile.speed

    return min(tiles, key=cost)


@lru_cache(maxsize=4096)
def choose_split_tile(num_rows: int, out_features: int, multiprocessors: int) -> tuple[Tile, int]:
    """For up to FEW_ROWS rows a tile and the blocks that share it: as many as give each multiprocessor a few."""
    if num_rows <= FLAT_NARROW.m:
        tile = FLAT_WIDE if out_features > 120 * multiprocessors else FLAT_NARROW
        most = 3 * multiprocessors
    else:
        tile = WIDE if out_features > 40 * multiprocessors else NARROW
        most = 2 * multiprocessors
    blocks = tile.blocks(num_rows, out_features)
    return tile, max((splits for splits in SPLITS.get(tile, ()) if blocks * splits <= most), default=1)


def float32_tile(num_rows: int, out_features: int, multiprocessors: int) -> int:
    """Large tiles where they give every multiprocessor one."""
    large, small = FLOAT32_TILES
    return large if ceil_div(num_rows, large) * ceil_div(out_features, large) >= multiprocessors else small


def float32_config(num_rows: int, out_features: int, tile: int) -> LaunchConfig:
    grid = (ceil_div(out_features, tile), ceil_div(num_rows, tile), 1)
    return LaunchConfig(grid, (FLOAT32_THREADS, 1, 1))


def matvec_rows(num_rows: int) -> int:
    """The smallest instantiation that holds `num_rows`."""
    return next(rows for rows in MATVEC_ROWS if rows >= num_rows)


def matvec_warps_per_output(out_features: int, in_features: int, itemsize: int, multiprocessors: int) -> int:
    """More than one warp an output where there are few outputs and each lane still gets a 16-byte vector.

    Must not depend on the number of rows: it decides the order of the sums.
    """
    vectors = in_features * itemsize // 16
    for warps in MATVEC_WARPS_PER_OUTPUT:
        enough = vectors >= warps * WARP_SIZE
        if enough and out_features * warps <= MATVEC_WARPS_PER_MULTIPROCESSOR * multiprocessors:
            return warps
    return 1


def matvec_config(out_features: int, warps_per_output: int) -> LaunchConfig:
    blocks = ceil_div(out_features * warps_per_output, MATVEC_WARPS)
    return LaunchConfig((blocks, 1, 1), (MATVEC_WARPS * WARP_SIZE, 1, 1))


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    pairs = matmul_decode.instantiations(dtypes) + matmul_hopper.instantiations(dtypes)
    for dtype in dtypes:
        for out_dtype in sorted({dtype, "float"}):
            pairs += [(MATVEC, (dtype, out_dtype, str(rows))) for rows in MATVEC_ROWS]
            if dtype != "float":
                tiles = TILES if out_dtype == dtype else LOGITS_TILES
                pairs += [(MATMUL, tile.template(dtype, out_dtype, aligned=True)) for tile in tiles]
                pairs.append((MATMUL, UNALIGNED_TILE.template(dtype, out_dtype, aligned=False)))
                if out_dtype == dtype:
                    pairs += [(MATMUL_SPLIT, _split_template(dtype, *choice)) for choice in SPLIT_CHOICES]
        if dtype == "float":
            pairs += [(MATMUL_FLOAT32, (str(tile),)) for tile in FLOAT32_TILES]
    return pairs


def _split_template(dtype: str, tile: Tile, splits: int) -> tuple[str, ...]:
    return (*tile.template(dtype, dtype, aligned=True)[:-1], str(splits))


class LinearOps(DequantizeOps):
    hopper_matmul: bool = True  # False: products of many rows never take the kernel of sm_90a

    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None:
        if self._decode_product(x, None, 0.0, weight, bias, out, accumulate=accumulate):
            return
        if self.hopper_matmul and launch_product(self.device, x, weight, bias, out, accumulate=accumulate):
            return
        num_rows, in_features = x.shape
        out_features = weight.shape[0]
        sizes = (num_rows, out_features, in_features, int(accumulate))
        multiprocessors = self.device.multiprocessors
        dtype, out_dtype = cuda_type(x.dtype), cuda_type(out.dtype)
        template: tuple[str, ...]
        if num_rows <= MATVEC_ROWS[-1]:
            warps = matvec_warps_per_output(out_features, in_features, x.dtype.itemsize, multiprocessors)
            template = (dtype, out_dtype, str(matvec_rows(num_rows)))
            config = matvec_config(out_features, warps)
            self.device.launch(MATVEC, template, config, x, weight, bias, out, *sizes, warps)
        elif x.dtype == float32:
            side = float32_tile(num_rows, out_features, multiprocessors)
            config = float32_config(num_rows, out_features, side)
            self.device.launch(MATMUL_FLOAT32, (str(side),), config, x, weight, bias, out, *sizes)
        else:
            self._matmul_half(x, weight, bias, out, sizes)

    def _matmul_half(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, sizes: tuple[int, int, int, int]
    ) -> None:
        """On tensor cores."""
        num_rows, out_features = sizes[:2]
        dtype, out_dtype = cuda_type(x.dtype), cuda_type(out.dtype)
        multiprocessors = self.device.multiprocessors
        is_aligned = _is_aligned(x, weight, out)
        clusters = self.device.compute_capability >= (9, 0)
        if is_aligned and num_rows <= FEW_ROWS and out.dtype == x.dtype and clusters:
            tile, splits = choose_split_tile(num_rows, out_features, multiprocessors)
        else:
            tiles = (UNALIGNED_TILE,) if not is_aligned else TILES if out.dtype == x.dtype else LOGITS_TILES
            tile, splits = choose_tile(num_rows, out_features, multiprocessors, tiles), 1
        config = tile.config(num_rows, out_features, splits)
        if splits > 1:
            template = _split_template(dtype, tile, splits)
            self.device.launch(MATMUL_SPLIT, template, config, x, weight, bias, out, *sizes)
        else:
            template = tile.template(dtype, out_dtype, is_aligned)
            self.device.launch(MATMUL, template, config, x, weight, bias, out, *sizes)

    def _linear(
        self, x: Tensor, weight: LinearWeight, prologue: Prologue | None, epilogue: Epilogue | None, out: Tensor
    ) -> None:
        if not self._fused(x, weight, prologue, epilogue, out):
            super()._linear(x, weight, prologue, epilogue, out)

    def _product(self, x: Tensor, weight: LinearWeight, out: Tensor, accumulate: bool) -> None:
        values = weight.dense
        if values is None:
            values = self._dequantized(weight, x.dtype)
        self._matmul(x, values, weight.bias, out, accumulate)

    def _fused(
        self, x: Tensor, weight: LinearWeight, prologue: Prologue | None, epilogue: Epilogue | None, out: Tensor
    ) -> bool:
        """The norm before or the gated activation after a dense product in its kernel; False where none does that."""
        values, gated = weight.dense, isinstance(epilogue, Activate)
        if values is None or isinstance(prologue, LayerNorm) or isinstance(epilogue, Accumulate):
            return False
        if isinstance(epilogue, Activate) and (epilogue.function != "silu_mul" or weight.bias is not None):
            return False
        if prologue is not None:
            norm, eps = prologue.weight, prologue.eps
            return self._decode_product(x, norm, eps, values, weight.bias, out, gated=gated)
        if not gated:
            return False  # a product alone
        if self._decode_product(x, None, 0.0, values, None, out, gated=True):
            return True
        return self.hopper_matmul and launch_product(self.device, x, values, None, out, silu_mul=True)

    def _decode_product(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        *,
        accumulate: bool = False,
        gated: bool = False,
    ) -> bool:
        """Run it as one `matmul_decode_kernel`; False where that kernel is not for it, and nothing was done."""
        if x.dtype == float32 or not _is_aligned(x, weight, out) or not aligned(16, norm):
            return False
        (num_rows, in_features), features = x.shape, out.shape[1]
        normed, logits = norm is not None, out.dtype != x.dtype
        multiprocessors = self.device.multiprocessors
        limits = Limits(multiprocessors, self.device.max_shared_bytes)
        tile = choose_decode_tile(
            num_rows,
            features,
            in_features,
            limits,
            gated=gated,
            normed=normed,
            logits=logits,
            float_range=x.dtype == bfloat16,
        )
        if tile is None:
            return False
        template = tile.template(cuda_type(x.dtype), cuda_type(out.dtype))
        config = tile.config(features, in_features, multiprocessors, normed=normed)
        sizes = (num_rows, weight.shape[0], in_features)
        flags = (int(accumulate), int(gated))
        self.device.launch(MATMUL_DECODE, template, config, x, norm, weight, bias, out, *sizes, eps, *flags)
        return True


def _is_aligned(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether `matmul_kernel` may move whole 16-byte segments in and pairs of results out."""
    whole = x.shape[1] % 8 == 0 and out.shape[1] % 2 == 0
    return whole and aligned(16, x, weight) and aligned(2 * out.dtype.itemsize, out)
