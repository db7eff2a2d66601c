"""Shapes of operands: rows of x, and k and n of products."""

from __future__ import annotations

NUM_ROWS = [0, 1, 2, 3, 4, 5, 7, 16, 17, 64, 129, 300]
WIDTHS = [1, 8, 31, 64, 172, 1000, 4096]

# Of products with something around them.
FUSED_ROWS = [1, 2, 3, 4, 8, 16, 33, 64, 130]
FUSED_SHAPES = [(1, 2), (31, 8), (64, 64), (172, 34), (1000, 1000), (1024, 6144), (4096, 512), (5128, 64)]
FUSED_SHAPES += [(1096, 6000), (264, 7400), (264, 16200)]  # every variant for few rows, also for several tiles a block
FUSED_SHAPES += [(264, 2000), (1544, 2600), (1032, 4400), (2312, 4400)]  # two, three and five units of eight a block
FUSED_SHAPES += [(10240, 64)]  # the longest of the single rows that stay in shared memory
