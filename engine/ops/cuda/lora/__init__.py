"""Low-rank adapters beside a product: rows grouped by slot, the product with A, and that with B added to the output.

Products of 2-byte elements in whole segments are on tensor cores. There the product with A may be divided into slices
of the width, which that with B adds in order: a row's sums have the same order and bits whether it is or not.
"""

from tessera.engine.cuda.kernel import Instantiation
from tessera.engine.ops.cuda.lora.kernels import (
    GROUP_ROWS,
    LORA_EXPAND,
    LORA_EXPAND_ANY,
    LORA_SHRINK,
    LORA_SHRINK_ANY,
    LORA_SHRINK_NORM,
    SM90_ADAPTED_MATMUL,
)
from tessera.engine.ops.cuda.lora.product import BFLOAT16, WARPGROUP_COLUMNS, template_of
from tessera.engine.ops.cuda.lora.shapes import EXPAND_SHAPES

SPECS = (GROUP_ROWS, LORA_SHRINK, LORA_SHRINK_NORM, LORA_EXPAND, LORA_SHRINK_ANY, LORA_EXPAND_ANY, SM90_ADAPTED_MATMUL)


def instantiations(dtypes: tuple[str, ...]) -> list[Instantiation]:
    """All that is launched for elements of these C types."""
    pairs: list[Instantiation] = [(GROUP_ROWS, ())]
    for dtype in dtypes:
        pairs += [(spec, (dtype,)) for spec in (LORA_SHRINK_ANY, LORA_EXPAND_ANY)]
        if dtype != "float":
            pairs.append((LORA_SHRINK, (dtype,)))
            if dtype == BFLOAT16:
                pairs.append((LORA_SHRINK_NORM, (dtype,)))
                pairs += [
                    (SM90_ADAPTED_MATMUL, template_of(columns, gated=gated))
                    for columns in WARPGROUP_COLUMNS
                    for gated in (False, True)
                ]
            pairs += [(LORA_EXPAND, shape.template(dtype, gated)) for shape in EXPAND_SHAPES for gated in (False, True)]
    return pairs
