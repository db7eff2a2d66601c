"""How products of a step could be launched otherwise: with more shared memory, by another variant.

For benchmarks of whole steps (`tests.bench.placement`): engines choose by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig
from tessera.engine.formats import KERNEL_FORMATS, PackedFormat
from tessera.engine.ops.cuda.fp8 import decode as fp8
from tessera.engine.ops.cuda.fp8.problem import Fp8Problem
from tessera.engine.ops.cuda.linear import decode
from tessera.engine.ops.cuda.quant import product as blocks
from tessera.engine.ops.cuda.quant import sm90_row, sm90_rows
from tessera.engine.ops.cuda.quant.slices import MAX_SLICES
from tessera.engine.ops.cuda.types import ceil_div

RESERVED_BYTES = 1024  # of a multiprocessor's shared memory, for each block
BEYOND_BYTES = 512  # more than a share of it
HALF = 1 / 2
SHARES = (HALF, 1 / 3, 2 / 3, 5 / 6)
RINGS = tuple(size << 10 for size in (40, 60, 80, 120, 160))
COUNTS = ("stages", "slices")  # that are parameters of some kernels
SHARED_MEMORY, TILE, RING, SLICES = "shared memory", "tile", "ring", "slices"


class Product(NamedTuple):
    """`kernel`: with the format of the weight, if it has variants for several; `features`: rows of the weight."""

    kernel: str
    features: int
    in_features: int

    def __str__(self) -> str:
        return f"{self.kernel} {self.features} x {self.in_features}"


class Launch(NamedTuple):
    spec: KernelSpec[Any]
    template: tuple[str, ...]
    config: LaunchConfig
    params: Any

    @property
    def product(self) -> Product | None:
        """None of a kernel that is none."""
        if not {"out_features", "in_features"} <= set(self.params._fields) or not self.config.shared_bytes:
            return None
        return product_of(self.spec, self._argument("F"), self.params.out_features, self.params.in_features)

    @property
    def normed(self) -> bool:
        return getattr(self.params, "norm", None) is not None

    @property
    def logits(self) -> bool:
        return self._argument("Out") == "float"

    @property
    def used_bytes(self) -> int:
        """Of a block's shared memory: it may ask for more, to have a multiprocessor for itself."""
        if self.spec is decode.MATMUL_DECODE:
            tile = decode.DecodeTile(*map(int, self.template[2:]))
            return tile.shared_bytes(self.params.in_features, normed=self.normed)
        if self.spec is fp8.FP8_DECODE:
            return fp8.Fp8DecodeTile(*map(int, self.template[2:5])).shared_bytes(self.params.in_features)
        if self.spec is blocks.BLOCK_MATMUL:
            block_tile = blocks.BlockTile(*map(int, self.template[3:]))
            format = KERNEL_FORMATS[self._argument("F")]
            return block_tile.shared_bytes(format, self.params.in_features, normed=self.normed)
        if self.spec is sm90_row.SM90_BLOCK_ROW:
            format = KERNEL_FORMATS[self._argument("F")]
            return sm90_row.shared_bytes(format, self.params.in_features, self.params.stages)
        return self.config.shared_bytes

    def _argument(self, name: str) -> str:
        return dict(zip(self.spec.template, self.template, strict=True)).get(name, "")

    @property
    def form(self) -> str:
        """Variant and sizes."""
        variant = ", ".join(self.template[1:])
        counts = "".join(f", {getattr(self.params, name)} {name}" for name in COUNTS if name in self.params._fields)
        return f"<{variant}>{counts}, {self.config.shared_bytes} B, {self.config.grid[0]} blocks"


def product_of(spec: KernelSpec[Any], format: PackedFormat | str, features: int, in_features: int) -> Product:
    kernel_type = format if isinstance(format, str) else format.kernel_type
    return Product(f"{spec.name} {kernel_type}".strip(), features, in_features)


def products_of(launches: list[Launch]) -> dict[Product, list[Launch]]:
    """Their launches, the largest product of a step first."""
    found: dict[Product, list[Launch]] = {}
    for launch in launches:
        if (product := launch.product) is not None:
            found.setdefault(product, []).append(launch)
    sizes = {product: len(each) * product.features * product.in_features for product, each in found.items()}
    return {product: found[product] for product in sorted(found, key=lambda product: -sizes[product])}


Change = tuple[Product, str]  # of a product what
Changes = Mapping[Change, Any]  # -> to what


@contextlib.contextmanager
def changed(changes: Changes) -> Iterator[None]:
    """Products are launched with these changes."""
    launch, launch_blocks, count_slices = CudaDevice.launch, blocks._launch, sm90_rows.count_slices
    choose, choose_fp8 = decode.choose_decode_tile, fp8.choose_tile

    def launched(
        device: CudaDevice, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig, params: Any
    ) -> None:
        found = Launch(spec, template, config, params)
        product = found.product
        asked = None if product is None else changes.get((product, SHARED_MEMORY))
        if asked is not None:
            config = config._replace(shared_bytes=max(found.used_bytes, asked))
        launch(device, spec, template, config, params)

    def chosen(num_rows: int, features: int, in_features: int, limits: Any, *, gated: bool, **around: Any) -> Any:
        product = product_of(decode.MATMUL_DECODE, "", features * (1 + gated), in_features)
        found = choose(num_rows, features, in_features, limits, gated=gated, **around)
        return found and changes.get((product, TILE), found)

    def chosen_fp8(problem: Fp8Problem, *limits: int) -> fp8.Fp8DecodeTile | None:
        product = product_of(fp8.FP8_DECODE, "", problem.weight_rows, problem.in_features)
        found = choose_fp8(problem, *limits)
        return found and changes.get((product, TILE), found)

    def launched_blocks(device: CudaDevice, operands: Any, part: Any, tile: Any, *around: Any) -> None:
        product = product_of(blocks.BLOCK_MATMUL, part.format, *part.shape)
        launch_blocks(device, operands, part, changes.get((product, TILE), tile), *around)

    def sliced(device: CudaDevice, format: PackedFormat, features: int, in_features: int) -> int | None:
        product = product_of(sm90_rows.SM90_BLOCK_ROWS, format, features, in_features)
        found = count_slices(device, format, features, in_features)
        return found and changes.get((product, SLICES), found)

    def with_ring(module: ModuleType, spec: KernelSpec[Any], launch: Any) -> Any:
        def launched(device: CudaDevice, operands: Any, *types: str, **around: Any) -> None:
            product = product_of(spec, operands.part.format, *operands.part.shape)
            ring = changes.get((product, RING), module.RING_BYTES)
            with mock.patch.object(module, "RING_BYTES", ring):
                launch(device, operands, *types, **around)

        return launched

    with contextlib.ExitStack() as patches:
        for module, name, function in (
            (CudaDevice, "launch", launched),
            (decode, "choose_decode_tile", chosen),
            (fp8, "choose_tile", chosen_fp8),
            (blocks, "_launch", launched_blocks),
            (sm90_rows, "count_slices", sliced),
            (sm90_row, "launch", with_ring(sm90_row, sm90_row.SM90_BLOCK_ROW, sm90_row.launch)),
            (sm90_rows, "launch", with_ring(sm90_rows, sm90_rows.SM90_BLOCK_ROWS, sm90_rows.launch)),
        ):
            patches.enter_context(mock.patch.object(module, name, function))
        yield


def share_bytes(device: CudaDevice, share: float) -> int:
    """What a block asks for so that blocks have a bit more than this share of a multiprocessor's shared memory."""
    multiprocessor = device.max_shared_bytes + RESERVED_BYTES
    return int(multiprocessor * share) - RESERVED_BYTES + BEYOND_BYTES


def values_for(launch: Launch, device: CudaDevice) -> Iterator[tuple[str, Any]]:
    """What can be changed of a product, and to what; shared memory of 0 is as much as it uses."""
    spec, params, limit = launch.spec, launch.params, device.max_shared_bytes
    if launch.used_bytes < launch.config.shared_bytes:
        yield SHARED_MEMORY, 0
    for share in SHARES:
        if (size := share_bytes(device, share)) > launch.used_bytes:
            yield SHARED_MEMORY, size
    if spec is decode.MATMUL_DECODE:
        now = decode.DecodeTile(*map(int, launch.template[2:]))
        for tile in decode.LOGITS_TILES if launch.logits else decode.TILES:
            fits = tile.fits(params.in_features, limit, normed=launch.normed)
            if tile.tokens == now.tokens and fits and tile.units % (1 + bool(params.gated)) == 0:
                yield TILE, tile
    elif spec is fp8.FP8_DECODE:
        for tile_fp8 in fp8.tiles_of(int(launch.template[2]), logits=launch.logits):
            if tile_fp8.fits(params.in_features, limit) and tile_fp8.units > params.gated:
                yield TILE, tile_fp8
    elif spec is blocks.BLOCK_MATMUL:
        format = KERNEL_FORMATS[launch.template[2]]
        for block_tile in blocks.TILES[int(launch.template[3])]:
            if block_tile.fits(format, params.in_features, limit, normed=launch.normed):
                yield TILE, block_tile
    elif spec is sm90_row.SM90_BLOCK_ROW or spec is sm90_rows.SM90_BLOCK_ROWS:
        for ring in RINGS:
            yield RING, ring
    if spec is sm90_rows.SM90_BLOCK_ROWS and params.slices > 1:
        format, most = KERNEL_FORMATS[launch.template[2]], max(sm90_rows.TOKENS)
        items = ceil_div(params.in_features, sm90_rows.ITEM)
        for slices in range(2, 1 + min(MAX_SLICES, items)):
            columns = ceil_div(items, slices) * sm90_rows.ITEM
            if sm90_rows.shared_bytes(format, most, columns, sm90_rows.MIN_STAGES, normed=False) <= limit:
                yield SLICES, slices
