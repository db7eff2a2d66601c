"""Launches of the portable products."""

from __future__ import annotations

import pytest

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda.linear.portable import (
    MATMUL,
    MATMUL_SPLIT,
    MatmulParams,
    Tile,
)
from tessera.engine.ops.cuda.types import cuda_type
from tessera.engine.tensor import Tensor


def name(choice: tuple[Tile, int]) -> str:
    tile, splits = choice
    return f"{tile.m}x{tile.n}x{splits}"


def launch(
    device: CudaDevice,
    choice: tuple[Tile, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """The kernel of this tile, whatever `choose_tile` would say; skips where blocks cannot share one."""
    (tile, splits), (m, k), n = choice, x.shape, weight.shape[0]
    spec, template = MATMUL, tile.template(cuda_type(x.dtype), cuda_type(out.dtype), aligned=True)
    if splits > 1:
        spec, template = MATMUL_SPLIT, (*template[:-1], str(splits))
    if not spec.supports(device.arch):
        pytest.skip(f"{spec.name} does not run on {device.arch}")
    params = MatmulParams(
        x=x,
        weight=weight,
        bias=bias,
        out=out,
        num_rows=m,
        out_features=n,
        in_features=k,
        accumulate=accumulate,
    )
    device.launch(spec, template, tile.config(m, n, splits), params)
