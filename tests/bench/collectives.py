"""Latency and bandwidth of sums over ranks: `python -m tests.bench.collectives [NUMBER_OF_GPUS]`.

Sums of bfloat16 that follow one another in a CUDA graph on each GPU, all launched at the same time; the slowest rank
counts. Bandwidth is that of the bytes of one rank's array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tessera.engine.collectives.cuda import CudaCollectives, PeerGroup
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.tensor import bfloat16, zeros

SIZES = [1 << power for power in range(12, 28, 2)]  # bytes
REPEATS = 100  # in a graph
ROUNDS = 5


def time_of(index: int, group: PeerGroup, nbytes: int, ranks: CudaCollectives, device: CudaDevice) -> float:
    """Microseconds of one sum on this rank, in the best of some rounds."""
    x = zeros((1, nbytes // bfloat16.itemsize), bfloat16, device)
    with device.capture() as finish:
        for _ in range(REPEATS):
            ranks.all_reduce(x)
    graph, best = finish(), float("inf")
    for _ in range(ROUNDS):
        start, end = device.event(timing=True), device.event(timing=True)
        device.synchronize()
        group.rendezvous.wait(index)
        start.record()
        graph.launch()
        end.record()
        end.synchronize()
        best = min(best, end.milliseconds_since(start) * 1000 / REPEATS)
    return best


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    group = PeerGroup(Rendezvous(count, timeout=60.0))
    devices = [CudaDevice(index) for index in range(count)]
    threads = ThreadPoolExecutor(count)

    def on_all(function: Callable[[int], float]) -> list[float]:
        return list(threads.map(function, range(count)))

    ranks: dict[int, CudaCollectives] = {}

    def join(index: int) -> float:
        ranks[index] = CudaCollectives(index, group, devices[index])
        ranks[index].compile(bfloat16)
        return 0.0

    on_all(join)
    print(f"{count} x {devices[0].device_name}")
    print(f"{'bytes':>10} {'us':>8} {'GB/s':>8}")
    for nbytes in SIZES:
        found = on_all(lambda index, size=nbytes: time_of(index, group, size, ranks[index], devices[index]))  # type: ignore[misc]
        slowest = max(found)
        print(f"{nbytes:>10} {slowest:>8.1f} {nbytes / slowest / 1000:>8.1f}")


if __name__ == "__main__":
    main()
