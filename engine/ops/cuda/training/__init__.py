"""The training operations as CUDA kernels.

Public: `ops.CudaTrainingOps`; `SPECS` and `instantiations`, their kernels, which no server compiles beforehand.
"""

from __future__ import annotations

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.ops.cuda.training import attention, elementwise, layer, linear, loss, optimizer, sm90, sums

GROUPS = (elementwise, sums, layer, linear, sm90, attention, loss, optimizer)
SPECS = tuple(spec for group in GROUPS for spec in group.SPECS)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that the operations launch for elements of these C types."""
    return [pair for group in GROUPS for pair in group.instantiations(dtypes)]
