"""Latency and bandwidth of sums over ranks: `python -m tests.bench.collectives [NUMBER_OF_GPUS]`.

Sums of bfloat16 that follow one another in a CUDA graph on each GPU, behind one that has the GPUs begin together; the
slowest rank counts. Bandwidth is that of the bytes of one rank's array. The last column is with the residual addition
and the norm of rows of HIDDEN elements; NCCL's column is empty where it is not installed. Each size's first sum is
compared with the right one. Behind them come the four products of one row of a layer of Llama 3 8B with both sums, in
kernels of their own and left to the next product. The last lines are JSON. What hangs for a minute ends with the place
of every thread and what the kernels wait for.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tessera.engine.collectives.cuda import CudaCollectives
from tessera.engine.collectives.interface import Collectives, LeftSum, SummedHalf
from tessera.engine.collectives.nccl import NcclCollectives, NcclGroup
from tessera.engine.collectives.nccl_library import NcclLibrary
from tessera.engine.collectives.peers import PeerGroup
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.contract.errors import ConfigError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.cuda.linear import rank_products
from tessera.engine.ops.linear_interface import Activate
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import Tensor, bfloat16, from_numpy, zeros

SIZES = [1 << power for power in range(12, 28)]  # bytes
REPEATS = 100  # in a graph
HIDDEN, INNER, QKV = 4096, 14336, 6144  # of Llama 3 8B
ROUNDS = 7
HANGS = 60.0  # seconds

T = TypeVar("T")


class Ranks:
    """Each rank's device and collectives, by functions that all ranks call at the same time."""

    def __init__(self, count: int) -> None:
        self.group = PeerGroup(Rendezvous(count, timeout=HANGS))
        self.devices = [CudaDevice(index) for index in range(count)]
        self._threads = ThreadPoolExecutor(count)
        self.collectives = self(self._join)
        self.nccl = self._nccl()
        self.warm_up = [zeros((1, 8), bfloat16, device) for device in self.devices]

    def _join(self, index: int) -> CudaCollectives:
        made = CudaCollectives(index, self.group, self.devices[index])
        made.prepare(bfloat16)
        made.starting = False
        return made

    def _nccl(self) -> list[NcclCollectives] | None:
        """NCCL's ranks; None where it is not installed."""
        try:
            group = NcclGroup(Rendezvous(len(self.devices), timeout=HANGS), NcclLibrary())
        except ConfigError as error:
            print(error)
            return None
        return self(lambda index: NcclCollectives(index, group, self.devices[index]))

    def __call__(self, function: Callable[[int], T]) -> list[T]:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            return list(self._threads.map(lambda index: self._guarded(function, index), range(len(self.devices))))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _guarded(self, function: Callable[[int], T], index: int) -> T:
        try:
            return function(index)
        except BaseException as error:
            print(f"rank {index}: {type(error).__name__}: {error}", flush=True)
            self.group.rendezvous.fail(index, error)
            print(*self.group.reports(), sep="\n", flush=True)
            raise

    def time_of(self, nbytes: int) -> float:
        """Microseconds of one sum on the slowest rank, in the best of some rounds. Raises: AssertionError."""
        return max(self(lambda index: self._time(index, nbytes, self.collectives[index])))

    def time_with_norm(self, nbytes: int) -> float:
        """The same with what follows it in a model, at once or in kernels of its own."""
        return max(self(lambda index: self._time_with_norm(index, nbytes)))

    def time_of_nccl(self, nbytes: int) -> float:
        """As `time_of`; not a number without NCCL."""
        nccl = self.nccl
        return float("nan") if nccl is None else max(self(lambda index: self._time(index, nbytes, nccl[index])))

    def _time(self, index: int, nbytes: int, ranks: Collectives) -> float:
        device = self.devices[index]
        size = nbytes // bfloat16.itemsize
        x = from_numpy(np.full((1, size), index + 1, bfloat16), device)
        ranks.all_reduce(x)
        count = len(self.devices)
        assert (x.numpy() == count * (count + 1) // 2).all(), f"wrong sums of {nbytes} bytes on rank {index}"
        return self._best(index, lambda: ranks.all_reduce(x))

    def _time_with_norm(self, index: int, nbytes: int) -> float:
        device, ranks = self.devices[index], self.collectives[index]
        shape = (nbytes // bfloat16.itemsize // HIDDEN, HIDDEN)
        x, stream, out = (zeros(shape, bfloat16, device) for _ in range(3))
        weight = zeros((HIDDEN,), bfloat16, device)
        ops = make_ops(device)

        def launch() -> None:
            if not ranks.all_reduce_add_norm(x, stream, weight, 1e-5, out):
                assert ranks.all_reduce_add(x, stream)
                ops.rmsnorm(stream, weight, 1e-5, out=out)

        launch()
        return self._best(index, launch)

    def time_of_layer(self, *, leaves: bool) -> float:
        """Of the products of one row, with their sums. `leaves`: to the products behind them; not a number where those
        kernels are not for it."""
        before, rank_products.LEAVES_SUMS = rank_products.LEAVES_SUMS, leaves
        try:
            return max(self(lambda index: self._time_of_layer(index, leaves=leaves)))
        finally:
            rank_products.LEAVES_SUMS = before

    def _time_of_layer(self, index: int, *, leaves: bool) -> float:
        device, ranks, count = self.devices[index], self.collectives[index], len(self.devices)
        ops = make_ops(device)

        def weight(features: int, width: int) -> LinearWeight:
            return LinearWeight.of(zeros((features, width), bfloat16, device))

        def row(width: int) -> Tensor:
            return zeros((1, width), bfloat16, device)

        inner, heads = INNER // count, HIDDEN // count
        out, up, down = weight(HIDDEN, heads), weight(2 * inner, HIDDEN), weight(HIDDEN, inner)
        qkv = weight(QKV // count, HIDDEN)
        attended, stream, between, update, normed = row(heads), row(HIDDEN), row(HIDDEN), row(HIDDEN), row(HIDDEN)
        activated, scratch, projected = row(inner), row(2 * inner), row(QKV // count)
        norm = zeros((HIDDEN,), bfloat16, device)
        if leaves and not ranks.leaves_sums([SummedHalf(out, up, "silu_mul"), SummedHalf(down, qkv, None)]):
            return math.nan

        def launch() -> None:
            if leaves:
                ranks.leave_sum(attended, out, 0, update)
                ranks.project_sum(stream, LeftSum(ranks, update, 0, between), norm, 1e-5, up, "silu_mul", activated)
                ranks.leave_sum(activated, down, 1, update)
                ranks.project_sum(between, LeftSum(ranks, update, 1, stream), norm, 1e-5, qkv, None, projected)
                return
            ops.linear(attended, out, out=update)
            assert ranks.all_reduce_add_norm(update, stream, norm, 1e-5, normed)
            ops.linear(normed, up, epilogue=Activate("silu_mul", scratch), out=activated)
            ops.linear(activated, down, out=update)
            assert ranks.all_reduce_add_norm(update, stream, norm, 1e-5, normed)
            ops.linear(normed, qkv, out=projected)

        launch()
        return self._best(index, launch)

    def _best(self, index: int, launch: Callable[[], object]) -> float:
        device, best = self.devices[index], float("inf")
        with device.capture() as finish:
            for _ in range(REPEATS):
                launch()
        graph = finish()
        for _ in range(ROUNDS):
            start, end = device.event(timing=True), device.event(timing=True)
            device.synchronize()
            self.group.rendezvous.wait(index)
            self.collectives[index].all_reduce(self.warm_up[index])
            start.record()
            graph.launch()
            end.record()
            end.synchronize()
            best = min(best, end.milliseconds_since(start) * 1000 / REPEATS)
        return best


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    ranks = Ranks(count)
    print(f"{count} x {ranks.devices[0].device_name}")
    print(f"{'bytes':>10} {'us':>8} {'GB/s':>8} {'with norm us':>14} {'NCCL us':>9} {'GB/s':>8}", flush=True)
    found = []
    for nbytes in SIZES:
        slowest = ranks.time_of(nbytes)
        normed = ranks.time_with_norm(nbytes) if nbytes >= HIDDEN * bfloat16.itemsize else float("nan")
        nccl = ranks.time_of_nccl(nbytes)
        own = f"{nbytes:>10} {slowest:>8.1f} {nbytes / slowest / 1000:>8.1f} {normed:>14.1f}"
        print(f"{own} {nccl:>9.1f} {nbytes / nccl / 1000:>8.1f}", flush=True)
        found.append({"bytes": nbytes, "us": slowest, "with norm us": normed, "NCCL us": nccl})
    layers = {"apart": ranks.time_of_layer(leaves=False), "left to products": ranks.time_of_layer(leaves=True)}
    print("sums of a layer of one row:", ", ".join(f"{name} {value:.1f} us" for name, value in layers.items()))
    print(json.dumps({f"layer, sums {name}, us": value for name, value in layers.items() if not math.isnan(value)}))
    for row in found:
        print(json.dumps({name: value for name, value in row.items() if not math.isnan(value)}))


if __name__ == "__main__":
    main()
