"""Shapes of operands."""

from __future__ import annotations

NUM_ROWS = [0, 1, 2, 3, 4, 5, 7, 16, 17, 64, 129, 300]


WIDTHS = [1, 8, 31, 64, 172, 1000, 4096]


FUSED_ROWS = [1, 2, 3, 4, 8, 16, 33, 64, 130]


FUSED_SHAPES = [(1, 2), (31, 8), (64, 64), (172, 34), (1000, 1000), (1024, 6144), (4096, 512), (5128, 64)]
