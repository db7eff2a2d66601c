"""Ranks that are threads of one process and share the host's memory: the reference for those on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.engine.collectives.interface import Collectives
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.ops.cpu.norm import rms_normalised
from tessera.engine.ops.cpu.precision import store, widen
from tessera.engine.tensor import Tensor

Array = np.ndarray[Any, Any]


class RankMemory:
    """The arrays that the ranks of a group share."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.arrays: list[Array] = [np.empty(0)] * rendezvous.size


class CpuCollectives(Collectives):
    """Each rank sums an equal share of the elements of all ranks and writes it to all of them.

    Two waits each: until all have come with their arrays, and until all are done with them.
    """

    def __init__(self, index: int, memory: RankMemory) -> None:
        super().__init__(index, memory.rendezvous)
        self._memory = memory

    @np.errstate(all="ignore")
    def all_reduce(self, x: Tensor) -> None:
        arrays = self._show(x.numpy().reshape(-1))
        share = slice(x.size * self.index // self.size, x.size * (self.index + 1) // self.size)
        total = arrays[0][share].astype(np.float32)
        for other in arrays[1:]:
            total += other[share]
        for array in arrays:
            array[share] = total
        self._wait()

    @np.errstate(all="ignore")
    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        arrays = self._show(x.numpy())
        total = arrays[0].astype(np.float32)
        for other in arrays[1:]:
            total += other
        self._wait()
        stream = residual.numpy()
        stream[...] = total + stream
        store(out, rms_normalised(widen(residual), widen(weight), eps))
        return True

    def gather_columns(self, x: Tensor, out: Tensor | None, *, first: int, whole: int) -> None:
        arrays = self._show(x.numpy())
        if self.index == 0:
            assert out is not None, "rank 0 has room for all columns"
            np.concatenate(arrays, axis=1, out=out.numpy())
        self._wait()

    def own_ids(self, ids: Tensor, sampled: Tensor | None, first: int, out: Tensor) -> Tensor:
        rows = ids.numpy()
        if sampled is not None and (rows < 0).any():
            rows = np.where(rows < 0, sampled.numpy()[np.maximum(-1 - rows, 0)], rows)
        own = rows.astype(np.int64) - first
        out.numpy()[...] = np.where((rows < 0) | (own < 0), np.iinfo(np.int32).max, own)
        return out

    @np.errstate(all="ignore")
    def norm_columns(self, x: Tensor, weight: Tensor, eps: float, *, first: int, centred: bool) -> None:
        columns = x.numpy()[:, first : first + weight.shape[0]]
        vectors = columns.astype(np.float32)
        width = np.float32(weight.shape[0] * self.size)
        if centred:
            vectors -= self._sum(vectors.sum(axis=1, keepdims=True)) / width
        mean_square = self._sum(np.square(vectors).sum(axis=1, keepdims=True)) / width
        vectors /= np.sqrt(mean_square + np.float32(eps))
        columns[...] = vectors * weight.numpy().astype(np.float32)

    def broadcast(self, x: Tensor) -> None:
        arrays = self._show(x.numpy())
        if self.index:
            x.numpy()[...] = arrays[0]
        self._wait()

    def all_reduce_max(self, x: Tensor) -> None:
        arrays = self._show(x.numpy())
        largest = np.maximum.reduce(arrays)
        self._wait()
        x.numpy()[...] = largest

    def _sum(self, values: Array) -> Array:
        """Of all ranks' values, in their order."""
        arrays = self._show(values)
        total = arrays[0].copy()
        for other in arrays[1:]:
            total += other
        self._wait()
        return total

    def _show(self, array: Array) -> list[Array]:
        """-> the arrays of all ranks, once all have shown theirs."""
        self._memory.arrays[self.index] = array
        self._wait()
        return self._memory.arrays

    def _wait(self) -> None:
        self.rendezvous.wait(self.index)
