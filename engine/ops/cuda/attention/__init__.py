"""Attention over the paged cache on CUDA devices.

Public: `AttentionOps`; `ATTENTION`, the table of its kernels, in which each file of this room registers its own.
"""

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.ops.cuda.attention import decode, general, prefill, rope, sm90_prefill
from tessera.engine.ops.cuda.attention.ops import AttentionOps
from tessera.engine.ops.cuda.attention.problem import ATTENTION

FILES = (decode, sm90_prefill, prefill, general, rope)
SPECS = tuple(spec for file in FILES for spec in file.SPECS)

__all__ = ["ATTENTION", "SPECS", "AttentionOps", "instantiations"]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that attention launches for elements of these C types."""
    return [pair for file in FILES for pair in file.instantiations(dtypes)]
