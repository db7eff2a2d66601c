"""Formats of weights and of cached keys and values.

Public: `LinearWeight`, `WeightPart` and `WeightFormat`; `DenseFormat`, `Fp8Format`, `GroupFormat`, `AffineFormat`,
`Nf4Format` and `Int8RowsFormat`; `BLOCK_FORMATS`, those of GGUF by type; `PackedFormat`, which kernels multiply, and
`KERNEL_FORMATS`, all of its kind by their struct in the kernels; `packed_format`, which chooses one; `KVFormat`;
`FORMATS`, every weight format by name;
`LoraStack`, `AdapterRows` and `AdapterSelection`, low-rank adapters beside a weight. A format belongs to a file of this
room that is imported here; one with a `dequantize_{name}_kernel` in `cuda_src/quant/dequantize.cu` runs on CUDA too.
"""

from tessera.engine.formats.dense import DenseFormat
from tessera.engine.formats.format import FORMATS, WeightFormat
from tessera.engine.formats.fp8 import Fp8Format
from tessera.engine.formats.gguf_blocks import BLOCK_FORMATS
from tessera.engine.formats.groups import AffineFormat, GroupFormat
from tessera.engine.formats.int8_rows import Int8RowsFormat
from tessera.engine.formats.kv import KVFormat
from tessera.engine.formats.linear_weight import LinearWeight, WeightPart
from tessera.engine.formats.lora import AdapterRows, AdapterSelection, LoraStack
from tessera.engine.formats.nf4 import Nf4Format
from tessera.engine.formats.packed import KERNEL_FORMATS, PackedFormat
from tessera.engine.formats.packed_blocks import PACKED_FORMATS, PackedBlockFormat
from tessera.engine.formats.packed_groups import PackedGroupFormat, packed_format

__all__ = [
    "BLOCK_FORMATS",
    "FORMATS",
    "KERNEL_FORMATS",
    "PACKED_FORMATS",
    "AdapterRows",
    "AdapterSelection",
    "AffineFormat",
    "DenseFormat",
    "Fp8Format",
    "GroupFormat",
    "Int8RowsFormat",
    "KVFormat",
    "LinearWeight",
    "LoraStack",
    "Nf4Format",
    "PackedBlockFormat",
    "PackedFormat",
    "PackedGroupFormat",
    "WeightFormat",
    "WeightPart",
    "packed_format",
]
