"""Ranks that are threads of the test, and what all kinds of collectives must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import numpy as np
import pytest

from tessera.engine.collectives.cpu import CpuCollectives, RankMemory
from tessera.engine.collectives.interface import Collectives
from tessera.engine.collectives.nccl import NcclGroup
from tessera.engine.collectives.peers import PeerGroup
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.tensor import CPU, Device, float32, from_numpy
from tests.support.cases.op_cases import random_array

Array = np.ndarray[Any, Any]
T = TypeVar("T")


class Ranks:
    """Calls a function in each rank's thread. Where one fails, the others end, and all later calls fail at once."""

    def __init__(
        self,
        devices: Sequence[Device],
        join: Callable[[int], Collectives],
        group: PeerGroup | NcclGroup | None = None,
    ) -> None:
        self.devices = devices
        self._group = group
        self._failed: BaseException | None = None
        self._threads = ThreadPoolExecutor(len(devices))
        self.collectives = self._on_all(join, range(len(devices)))

    def __call__(self, function: Callable[[Collectives, Device], T]) -> list[T]:
        return self._on_all(function, self.collectives, self.devices)

    def _on_all(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        if self._failed is not None:
            pytest.fail(f"the ranks have failed before: {self._failed}", pytrace=False)
        calls = [self._threads.submit(self._guarded, function, *each) for each in zip(*arguments, strict=True)]
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            raise errors[0]
        return [call.result() for call in calls]

    def _guarded(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return function(*arguments)
        except BaseException as error:
            rank = next((each.index for each in arguments if isinstance(each, Collectives)), arguments[0])
            self._failed = self._failed or error
            print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
            if self._group is not None:
                self._group.rendezvous.fail(rank, error)
                print(*self._group.reports(), sep="\n", flush=True)
            raise

    def close(self) -> None:
        self._threads.shutdown()


def on_cpu(count: int) -> Ranks:
    memory = RankMemory(Rendezvous(count, timeout=30.0))
    return Ranks([CPU] * count, lambda index: CpuCollectives(index, memory))


def reduced(ranks: Ranks, arrays: list[Array]) -> list[Array]:
    def call(collectives: Collectives, device: Device) -> Array:
        x = from_numpy(arrays[collectives.index], device)
        collectives.all_reduce(x)
        return np.array(x.numpy())

    return ranks(call)


def check_sums(ranks: Ranks, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    """They have the bits of ranks on the CPU."""
    arrays = [random_array(seed, shape, dtype) for seed in range(len(ranks.devices))]
    with closing(on_cpu(len(arrays))) as cpu:
        expected = reduced(cpu, arrays)
    for array in reduced(ranks, arrays):
        np.testing.assert_array_equal(array, expected[0])


def check_columns_and_tokens(ranks: Ranks) -> None:
    """Columns are gathered by rank 0, and its tokens told to all."""
    count, rows = len(ranks.devices), 3
    widths = [5 + index for index in range(count)]
    parts = [random_array(seed, (rows, width), float32) for seed, width in enumerate(widths)]

    def call(collectives: Collectives, device: Device) -> tuple[Array | None, Array]:
        index = collectives.index
        out = from_numpy(np.zeros((rows, sum(widths)), np.float32), device) if index == 0 else None
        collectives.gather_columns(from_numpy(parts[index], device), out, first=sum(widths[:index]), whole=sum(widths))
        tokens = from_numpy(np.arange(700, dtype=np.int32) * (1 if index == 0 else -1), device)
        collectives.broadcast(tokens)
        return None if out is None else np.array(out.numpy()), np.array(tokens.numpy())

    found = ranks(call)
    assert found[0][0] is not None
    assert np.array_equal(found[0][0], np.concatenate(parts, axis=1))
    assert all(np.array_equal(tokens, np.arange(700)) for _, tokens in found)


def check_largest(ranks: Ranks) -> None:
    parts = [np.random.default_rng(seed).integers(0, 2**64, 700, np.uint64) for seed in range(len(ranks.devices))]

    def call(collectives: Collectives, device: Device) -> Array:
        x = from_numpy(parts[collectives.index], device)
        collectives.all_reduce_max(x)
        return np.array(x.numpy())

    assert all(np.array_equal(found, np.maximum.reduce(parts)) for found in ranks(call))


def check_own_ids(ranks: Ranks) -> None:
    """Token ids are rows of a part of the vocabulary."""
    ids, sampled = np.array([0, 7, 12, -1, -3, 40], np.int32), np.array([9, 1, 30], np.int32)

    def call(collectives: Collectives, device: Device) -> Array:
        out = from_numpy(np.zeros(6, np.int32), device)
        found = collectives.own_ids(from_numpy(ids, device), from_numpy(sampled, device), 7, out)
        return np.array(found.numpy())

    outside = np.iinfo(np.int32).max
    assert ranks(call)[0].tolist() == [outside, 0, 5, 2, 23, 33]


def check_graphs(ranks: Ranks) -> None:
    """Replays stay in step, so that none takes what the one before left for its own."""

    def call(collectives: Collectives, device: Any) -> Array:
        x = from_numpy(np.ones((1, 512), np.float32), device)
        with device.capture() as finish:
            collectives.all_reduce(x)
            collectives.all_reduce(x)
        graph = finish()
        for _ in range(3):
            graph.launch()
        return np.array(x.numpy())

    count = len(ranks.devices)
    assert all((array == count**6).all() for array in ranks(call))
