"""Packed weights: the blocks of GGUF files brought into that form, and elements made of it.

Their kernels are templates on the type of the blocks, a struct of `cuda_src/include/quant/block_formats.cuh`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.cuda.generated import Constant, declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec, LaunchConfig
from tessera.engine.cuda.params import InFloat, InInt, Int32, InUint, OutFloat, OutT, OutUint, Pointer
from tessera.engine.formats import KERNEL_FORMATS, PACKED_FORMATS, PackedFormat, WeightPart
from tessera.engine.formats.nf4 import NF4_VALUES
from tessera.engine.gguf.blocks import TABLES
from tessera.engine.ops.cuda.linear.quantize_rows import OutBytes
from tessera.engine.ops.cuda.types import WARP_SIZE, ceil_div, cuda_type
from tessera.engine.tensor import Tensor, bfloat16, float16, float32


class PackBlocksParams(NamedTuple):
    stored: Annotated[Pointer, "const unsigned char*"]
    codes: OutUint
    headers: OutUint
    columns: Int32


class DequantizeBlocksParams(NamedTuple):
    codes: InUint
    headers: InUint
    ids: InInt
    sampled: InInt
    out: OutT
    num_stored: Int32
    rows: Int32
    columns: Int32


class BlockScalesParams(NamedTuple):
    codes: InUint
    headers: InUint
    scales: OutFloat
    columns: Int32


class BlocksToInt8Params(NamedTuple):
    codes: InUint
    headers: InUint
    scales: InFloat
    values: OutBytes
    columns: Int32


PACK_BLOCKS = KernelSpec(
    file="quant/blocks.cu",
    name="pack_blocks_kernel",
    template=("F",),
    params=PackBlocksParams,
    writes_weights=True,
    on_demand=True,
)
DEQUANTIZE_BLOCKS = KernelSpec(
    file="quant/blocks.cu",
    name="dequantize_blocks_kernel",
    template=("T", "F"),
    params=DequantizeBlocksParams,
    writes_weights=True,
    overlaps=True,
    on_demand=True,
)
BLOCK_SCALES = KernelSpec(
    file="quant/blocks.cu",
    name="block_scales_kernel",
    template=("F",),
    params=BlockScalesParams,
    writes_weights=True,
    on_demand=True,
)
BLOCKS_TO_INT8 = KernelSpec(
    file="quant/blocks.cu",
    name="blocks_to_int8_kernel",
    template=("F",),
    params=BlocksToInt8Params,
    writes_weights=True,
    overlaps=True,
    on_demand=True,
)
LANE_ELEMENTS = 32  # of a thread
ROW_WARPS = Constant(8, "of a block that dequantises")
SPECS = (PACK_BLOCKS, DEQUANTIZE_BLOCKS, BLOCK_SCALES, BLOCKS_TO_INT8)


def _nf4_tables() -> str:
    """Byte i of each of the 16 values in an element type, as table `Nf4{type}Byte{i}`."""
    texts = []
    for name, dtype in (("Bfloat16", bfloat16), ("Float16", float16), ("Float32", float32)):
        planes = NF4_VALUES.astype(dtype).view(np.int8).reshape(len(NF4_VALUES), -1).T
        texts += [_table(f"Nf4{name}Byte{i}", tuple(plane.tolist())) for i, plane in enumerate(planes)]
    return "".join(texts)


def _table(name: str, values: tuple[int, ...]) -> str:
    """The bytes of a table as four words."""
    words = np.array(values, np.int8).view("<u4")
    members = "".join(f"  static constexpr unsigned WORD_{i} = {word:#010x};\n" for i, word in enumerate(words))
    return f"struct {name} {{\n  static constexpr bool LOOKS_UP = true;\n{members}}};\n"


declare_header(
    "blocks",
    __name__,
    {"ROW_WARPS": ROW_WARPS},
    (PackBlocksParams, DequantizeBlocksParams, BlockScalesParams, BlocksToInt8Params),
)
declare_header(
    "block_formats",
    __name__,
    declarations=_table("NonlinearTable", TABLES["IQ4_NL"]) + _table("TwiceE2M1Table", TABLES["MXFP4"]) + _nf4_tables(),
)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    packing: list[Instantiation] = [(PACK_BLOCKS, (name,)) for name in PACKED_FORMATS]
    packing += [(spec, (name,)) for spec in (BLOCK_SCALES, BLOCKS_TO_INT8) for name in KERNEL_FORMATS]
    return packing + [(DEQUANTIZE_BLOCKS, (dtype, name)) for dtype in dtypes for name in KERNEL_FORMATS]


def launch_scales(device: CudaDevice, part: WeightPart, scales: Tensor) -> None:
    """The scales [N] of a part's rows as int8."""
    assert isinstance(part.format, PackedFormat)
    codes, headers = (part.tensors[name] for name in part.format.tensor_names)
    rows, columns = part.shape
    params = BlockScalesParams(codes=codes, headers=headers, scales=scales, columns=columns)
    config = LaunchConfig((rows, 1, 1), (ROW_WARPS * WARP_SIZE, 1, 1))
    device.launch(BLOCK_SCALES, (part.format.kernel_type,), config, params)


def launch_to_int8(device: CudaDevice, part: WeightPart, scales: Tensor, values: Tensor) -> None:
    """A part as int8 `values` [N, K], by the `scales` of `launch_scales`."""
    assert isinstance(part.format, PackedFormat)
    codes, headers = (part.tensors[name] for name in part.format.tensor_names)
    rows, columns = part.shape
    params = BlocksToInt8Params(codes=codes, headers=headers, scales=scales, values=values, columns=columns)
    pieces = _pieces(part.format, columns)
    blocks = ceil_div(pieces, ROW_WARPS)
    config = LaunchConfig((rows, blocks, 1), (ceil_div(pieces, blocks) * WARP_SIZE, 1, 1))
    device.launch(BLOCKS_TO_INT8, (part.format.kernel_type,), config, params)


def _pieces(format: PackedFormat, columns: int) -> int:
    """Of a row, one for each warp."""
    return ceil_div(ceil_div(columns, format.span) * format.span, WARP_SIZE * LANE_ELEMENTS)


def launch_dequantize(
    device: CudaDevice, part: WeightPart, ids: Tensor | None, sampled: Tensor | None, out: Tensor
) -> None:
    """Rows of a part, all or those that `ids` name, to `out`."""
    assert isinstance(part.format, PackedFormat)
    (stored, columns), (rows, _) = part.shape, out.shape
    codes, headers = (part.tensors[name] for name in part.format.tensor_names)
    params = DequantizeBlocksParams(
        codes=codes,
        headers=headers,
        ids=ids,
        sampled=sampled,
        out=out,
        num_stored=stored,
        rows=rows,
        columns=columns,
    )
    pieces = rows * _pieces(part.format, columns)
    config = LaunchConfig((ceil_div(pieces, ROW_WARPS), 1, 1), (ROW_WARPS * WARP_SIZE, 1, 1))
    device.launch(DEQUANTIZE_BLOCKS, (cuda_type(out.dtype), part.format.kernel_type), config, params)
