"""Cross entropy on the CPU: the vocabulary in chunks, or the tokens where losses come with their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.ops.cpu.precision import Float32Array, store, widen, widen_array
from tessera.engine.ops.training.interface import TrainingOps
from tessera.engine.tensor import Tensor, float32

IntArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

CHUNK_ELEMENTS = 1 << 20  # logits of a chunk, unless the fewest columns need more
MIN_COLUMNS = 128
MIN_ROWS = 16
LOWEST = np.float32(
    -60
)  # logarithm of a probability whose gradient is wanted: products with subnormal numbers are slow


class CpuLossTraining(TrainingOps):
    @np.errstate(all="ignore")
    def _linear_cross_entropy(
        self, x: Tensor, weight: Tensor, targets: Tensor, multiplier: float, losses: Tensor, logsumexp: Tensor
    ) -> None:
        losses.numpy()[...] = logsumexp.numpy()[...] = 0
        counted = _counted(targets, weight.shape[0])
        if not counted.size:
            return
        rows, wanted = widen_array(x.numpy()[counted]), targets.numpy()[counted]
        chosen = np.empty(len(counted), np.float32)
        highest = np.full((len(counted), 1), -np.inf, np.float32)
        total = np.zeros((len(counted), 1), np.float32)
        for chunk, logits in _chunks(rows, weight, multiplier):
            inside, column = _inside(wanted, chunk)
            chosen[inside] = logits[inside, column]
            above = np.maximum(highest, logits.max(axis=-1, keepdims=True))
            logits -= above
            np.exp(logits, out=logits)
            total *= np.exp(highest - above)
            total += logits.sum(axis=-1, keepdims=True)
            highest = above
        logs = (highest + np.log(total))[:, 0]
        logsumexp.numpy()[counted] = logs
        losses.numpy()[counted] = logs - chosen

    @np.errstate(all="ignore")
    def _linear_cross_entropy_gradient(
        self,
        factors: Tensor,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        multiplier: float,
        losses: Tensor | None,
        logsumexp: Tensor,
        weight_gradient: Tensor | None,
        out: Tensor,
    ) -> None:
        if losses is not None and weight.dtype == float32:
            _losses_and_gradient(factors, x, weight, targets, multiplier, losses, logsumexp, weight_gradient, out)
            return
        if losses is not None:  # a copy in float32 of the whole weight would take twice its memory
            self._linear_cross_entropy(x, weight, targets, multiplier, losses, logsumexp)
        counted = _counted(targets, weight.shape[0])
        counted = counted[factors.numpy()[counted] != 0]
        result = np.zeros(x.shape, np.float32)
        if counted.size:
            rows, wanted = widen_array(x.numpy()[counted]), targets.numpy()[counted]
            logs = logsumexp.numpy()[counted][:, None]
            scale = factors.numpy()[counted][:, None] * np.float32(multiplier)
            dx = np.zeros_like(rows)
            for chunk, logits in _chunks(rows, weight, multiplier):
                logits -= logs
                np.maximum(logits, LOWEST, out=logits)
                np.exp(logits, out=logits)
                inside, column = _inside(wanted, chunk)
                logits[inside, column] -= 1
                logits *= scale
                dx += np.matmul(logits, widen(weight[chunk]))
                if weight_gradient is not None:
                    weight_gradient[chunk].numpy()[...] += np.matmul(logits.T, rows)
            result[counted] = dx
        store(out, result)


@np.errstate(all="ignore")
def _losses_and_gradient(
    factors: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    multiplier: float,
    losses: Tensor,
    logsumexp: Tensor,
    weight_gradient: Tensor | None,
    out: Tensor,
) -> None:
    """Of a float32 weight, from the same logits: so many tokens at a time that these have at most CHUNK_ELEMENTS."""
    losses.numpy()[...] = logsumexp.numpy()[...] = 0
    result = np.zeros(x.shape, np.float32)
    counted = _counted(targets, weight.shape[0])
    step = max(CHUNK_ELEMENTS // weight.shape[0], MIN_ROWS)
    wide = weight.numpy()
    for start in range(0, counted.size, step):
        some = counted[start : start + step]
        rows, wanted = widen_array(x.numpy()[some]), targets.numpy()[some]
        every = np.arange(len(some))
        logits: Float32Array = np.matmul(rows, wide.T)
        logits *= np.float32(multiplier)
        chosen = logits[every, wanted]
        highest = logits.max(axis=-1, keepdims=True)
        logits -= highest
        np.maximum(logits, LOWEST, out=logits)
        np.exp(logits, out=logits)
        total = logits.sum(axis=-1, keepdims=True)
        logs = (highest + np.log(total))[:, 0]
        logsumexp.numpy()[some] = logs
        losses.numpy()[some] = logs - chosen
        logits /= total
        logits[every, wanted] -= 1
        logits *= factors.numpy()[some][:, None] * np.float32(multiplier)
        result[some] = np.matmul(logits, wide)
        if weight_gradient is not None:
            weight_gradient.numpy()[...] += np.matmul(logits.T, rows)
    store(out, result)


def _counted(targets: Tensor, vocab_size: int) -> IntArray:
    """Rows whose target is a token."""
    wanted = targets.numpy()
    return np.flatnonzero((wanted >= 0) & (wanted < vocab_size))


def _chunks(rows: Float32Array, weight: Tensor, multiplier: float) -> Iterator[tuple[slice, Float32Array]]:
    """Ranges of the vocabulary with their logits [n, columns], which may be overwritten."""
    step = max(CHUNK_ELEMENTS // len(rows), MIN_COLUMNS)
    for start in range(0, weight.shape[0], step):
        chunk = slice(start, min(start + step, weight.shape[0]))
        logits: Float32Array = np.matmul(rows, widen(weight[chunk]).T)
        if multiplier != 1.0:
            logits *= np.float32(multiplier)
        yield chunk, logits


def _inside(wanted: IntArray, chunk: slice) -> tuple[IntArray, IntArray]:
    """Rows whose target lies in the chunk, and its column there."""
    inside = np.flatnonzero((wanted >= chunk.start) & (wanted < chunk.stop))
    return inside, wanted[inside] - chunk.start
