"""Rows of attention, and memory that splits leave."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import sm90_prefill
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, from_numpy
from tests.support.cases.op_cases import AttentionInputs

Array = np.ndarray[Any, Any]


def attend(ops: Ops, inputs: AttentionInputs, out: Tensor | None = None) -> Array:
    case = inputs.case
    key_cache, value_cache = inputs.caches(ops.device)
    return ops.paged_attention(
        from_numpy(inputs.q, ops.device),
        key_cache,
        value_cache,
        inputs.metadata(ops.device),
        scale=case.scale,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        out=out,
    ).numpy()


GROWING_ROWS = ((60, 600), (1, 300), (7, 500))


def grow(inputs: AttentionInputs) -> None:
    """Scores of each 128 keys are of another size: from a row's last key to its first, the way of prompts, they grow by
    far more than 2^8, fall, and grow again."""
    for row, (_, context) in enumerate(inputs.case.rows):
        slots = np.arange(context)
        block, offset = inputs.block_tables[row, slots // inputs.case.block_size], slots % inputs.case.block_size
        sizes = np.array([30, 3, 8, 1, 1], np.float32)[slots // 128]
        grown = inputs.key_cache[block, :, offset].astype(np.float32) * sizes[:, None, None]
        inputs.key_cache[block, :, offset] = grown.astype(inputs.case.dtype)


def poison_splits(ops: CudaOps) -> Tensor | None:
    """Where splits of keys leave their results, all NaN; None where keys are never split."""
    if ops.device.arch != "90a":
        return None
    partials = sm90_prefill.splits_of(ops.attention_memory).partials
    partials.upload(np.full(partials.shape, np.nan, np.float32))
    return partials


def assert_splits_are_done(ops: CudaOps) -> None:
    if ops.device.arch == "90a":
        assert not sm90_prefill.splits_of(ops.attention_memory).arrivals.numpy().any(), (
            "the next launch finds counters that are not 0"
        )
