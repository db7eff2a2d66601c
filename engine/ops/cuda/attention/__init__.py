"""Attention over the paged cache on CUDA devices.

Public: `AttentionOps`; `OF_E4M3`, the kernels for a KV cache of e4m3; `ATTENTION`, the table of its kernels, in which
each file of this room registers its own.
"""

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.ops.cuda.attention import decode, drafts, general, prefill, rope, sm90_prefill, whole_rope, widen
from tessera.engine.ops.cuda.attention.ops import AttentionOps
from tessera.engine.ops.cuda.attention.problem import ATTENTION

FILES = (decode, drafts, sm90_prefill, prefill, general, rope, whole_rope, widen)
# By those for a cache of 16 or 32 bits.
OF_E4M3 = {spec: small for file in FILES if file is not widen for spec, small in file.OF_E4M3.items()}
SPECS = tuple(spec for file in FILES for spec in file.SPECS)

__all__ = ["ATTENTION", "OF_E4M3", "SPECS", "AttentionOps", "instantiations"]


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that attention launches for elements of these C types."""
    return [pair for file in FILES for pair in file.instantiations(dtypes)]
