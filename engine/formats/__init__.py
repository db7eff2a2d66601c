"""Formats of weights and of cached keys and values.

Public: `LinearWeight`, `WeightPart` and `WeightFormat`; `DenseFormat` and `Int8RowsFormat`; `KVFormat`;
`FORMATS`, every weight format by name. A format is one file of this room that is imported here; one with a
`dequantize_{name}_kernel` in `cuda_src/linear/dequantize.cu` runs on CUDA devices too.
"""

from tessera.engine.formats.dense import DenseFormat
from tessera.engine.formats.format import FORMATS, WeightFormat
from tessera.engine.formats.int8_rows import Int8RowsFormat
from tessera.engine.formats.kv import KVFormat
from tessera.engine.formats.linear_weight import LinearWeight, WeightPart

__all__ = ["FORMATS", "DenseFormat", "Int8RowsFormat", "KVFormat", "LinearWeight", "WeightFormat", "WeightPart"]
