"""Matrix products by dense weights on CUDA devices.

Public: `LINEAR`, the table of their kernels, in which each file of this room registers its own.
"""

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.ops.cuda.linear import decode, float32_gemm, gemv, ordered, portable, sm90
from tessera.engine.ops.cuda.linear.problem import LINEAR

FILES = (decode, sm90, ordered, gemv, float32_gemm, portable)
SPECS = tuple(spec for file in FILES for spec in file.SPECS)

__all__ = ["LINEAR", "SPECS", "instantiations"]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that products launch for elements of these C types."""
    return [pair for file in FILES for pair in file.instantiations(dtypes)]
