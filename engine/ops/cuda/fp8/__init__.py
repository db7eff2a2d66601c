"""Products by e4m3 weights, of activations rounded to e4m3 as well.

Public: `SPECS` and `instantiations`, the kernels; `problem.FP8_LINEAR`, the table of those that multiply;
`dequantize.launch_dequantize`, for what they do not take. Their rows come from `linear.quantize_rows`.
"""

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.ops.cuda.fp8 import decode, dequantize, portable, sm90, sm90_rows

FILES = (decode, sm90_rows, sm90, portable, dequantize)
SPECS = tuple(spec for file in FILES for spec in file.SPECS)

__all__ = ["SPECS", "instantiations"]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that these products launch for elements of these C types."""
    return [pair for file in FILES for pair in file.instantiations(dtypes)]
