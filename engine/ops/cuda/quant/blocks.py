"""Packed weights: the blocks of GGUF files brought into that form, and elements made of it.

Their kernels are templates on the type of the blocks, a struct of `cuda_src/include/block_formats.cuh`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from tessera.engine.cuda.generated import declare_header
from tessera.engine.cuda.kernel import Instantiation, KernelSpec
from tessera.engine.cuda.params import InInt, Int32, InUint, OutT, OutUint, Pointer
from tessera.engine.formats import KERNEL_FORMATS, PACKED_FORMATS
from tessera.engine.formats.nf4 import NF4_VALUES
from tessera.engine.gguf.blocks import TABLES
from tessera.engine.tensor import bfloat16, float16, float32


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
    columns: Int32


PACK_BLOCKS = KernelSpec(
    file="linear/blocks.cu",
    name="pack_blocks_kernel",
    template=("F",),
    params=PackBlocksParams,
    writes_weights=True,
    on_demand=True,
)
DEQUANTIZE_BLOCKS = KernelSpec(
    file="linear/blocks.cu",
    name="dequantize_blocks_kernel",
    template=("T", "F"),
    params=DequantizeBlocksParams,
    writes_weights=True,
    on_demand=True,
)
LANE_ELEMENTS = 32  # of a thread
SPECS = (PACK_BLOCKS, DEQUANTIZE_BLOCKS)


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


declare_header("blocks", __name__, params=(PackBlocksParams, DequantizeBlocksParams))
declare_header(
    "block_formats",
    __name__,
    declarations=_table("NonlinearTable", TABLES["IQ4_NL"]) + _table("TwiceE2M1Table", TABLES["MXFP4"]) + _nf4_tables(),
)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these operations launch for elements of these C types."""
    packing: list[Instantiation] = [(PACK_BLOCKS, (name,)) for name in PACKED_FORMATS]
    return packing + [(DEQUANTIZE_BLOCKS, (dtype, name)) for dtype in dtypes for name in KERNEL_FORMATS]
