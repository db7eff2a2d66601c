"""Hours of mixed load and attack: `python -m tests.attack.soak --hours 2`; is memory flat, is latency flat?

Parts take turns in an order of the seed; canaries go on beside them. What was measured goes to build/soak, as JSON and
as plots. Ends with 1 where memory or latency have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop

import tests.support.processes.single_blas_thread  # noqa: F401 (it must come before NumPy)
from docs.generate.svg import LIGHT, line, picture, text
from tests.attack import amplification, disconnects, fuzz, overload, raw_http
from tests.attack.canaries import Canaries
from tests.attack.context import Attack
from tests.attack.findings import CANARY_FACTOR, MEMORY_GROWTH, Findings, Part
from tests.attack.kv_cache import fill_kv_cache
from tests.attack.niceness import giving_way
from tests.attack.target import CANARY, Target, num_descriptors, running, serve_command
from tests.support.paths import ROOT
from tests.support.servers.server_fixture import write_tiny_model

# Faults are left out: they replace processes, whose memory then begins anew.
WEIGHTS = {fuzz: 6, raw_http: 4, disconnects: 6, overload: 3, amplification: 1}
NICENESS = 5  # of the attack's process beside the server's, whose cores clients elsewhere would not take
TURN = 20.0  # seconds of one part
SAMPLE = 10.0  # seconds
WARM_UP = 0.2  # share of the time after which memory and latency must be flat
LATENCY_GROWTH = 1.5  # of the median canary, end beside beginning: other work on the machine shows in it
FOLDER = ROOT / "build" / "soak"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 260, 70, 40, 46


@dataclass
class Sample:
    """One look at the server. Times are seconds, memory bytes."""

    at: float
    attack: str  # module of the part under way
    memory: int
    descriptors: int
    requests: int
    canary: float  # median since the sample before, as a multiple of its quiet time
    slowest_canary: float  # as a multiple of what it may take: its quiet time and a step
    memories: dict[str, int] = field(default_factory=dict)  # of each process


class Soak:
    def __init__(self, target: Target, model: str, seed: int, seconds: float, rate: float) -> None:
        self._target = target
        self._model = model
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._rate = rate
        self._canaries = Canaries(target.wire, model)
        self._multiples: list[float] = []
        self.part = Part()
        self.samples: list[Sample] = []
        self._attack = ""

    async def run(self) -> None:
        await fill_kv_cache(self._target, self._model, self._rng)
        await self._canaries.learn()
        print(f"quiet: {self._canaries.quiet}", flush=True)
        self._canaries.on_right = self._multiples.append
        self._canaries.part = self.part
        document = json.loads((await self._target.wire.get("/openapi.json", key=CANARY)).body)
        begin = time.monotonic()
        end = begin + self._seconds
        await self._canaries.start()
        with giving_way(NICENESS):
            flock = asyncio.create_task(self._canaries.watch())
            sampler = asyncio.create_task(self._sample(begin))
            while time.monotonic() < end and self._target.is_alive():
                (part,) = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
                self._attack = part.__name__.rpartition(".")[2]
                turn = min(TURN, end - time.monotonic())
                attack = Attack(
                    *(self._target, Findings(), self._canaries, document, self._model, self._rng),
                    num_requests=10**9,
                    end=time.monotonic() + turn,
                    part=self.part,
                    rate=self._rate,
                )
                await part.run(attack)
            self._canaries.stop()
            await flock
            sampler.cancel()

    async def _sample(self, begin: float) -> None:
        while True:
            await asyncio.sleep(min(SAMPLE, self._seconds / 30))
            found, self._multiples[:] = list(self._multiples), []
            if not found:
                continue
            pids = self._target.own_pids()
            memories = self._target.memories()
            slowest, self.part.slowest_canary = self.part.slowest_canary, 0.0
            self.samples.append(
                Sample(
                    at=time.monotonic() - begin,
                    attack=self._attack,
                    memory=sum(memories.values()),
                    descriptors=sum(map(num_descriptors, pids)),
                    requests=self.part.requests,
                    canary=statistics.median(found),
                    slowest_canary=slowest,
                    memories=memories,
                )
            )


def verdict(samples: Sequence[Sample]) -> list[tuple[str, bool]]:
    """(sentence, whether it is as promised): the last third beside the first one after the warm-up."""
    kept = samples[int(WARM_UP * len(samples)) :]
    third = max(len(kept) // 3, 1)
    first, last = kept[:third], kept[-third:]

    def growth(value: Callable[[Sample], float]) -> float:
        return statistics.median(map(value, last)) / max(statistics.median(map(value, first)), 1e-9)

    memory, latency = growth(lambda one: one.memory), growth(lambda one: one.canary)
    slowest = max(one.slowest_canary for one in samples)
    return [
        (f"memory grew to {memory:.1%}, allowed {1 + MEMORY_GROWTH:.0%}", memory <= 1 + MEMORY_GROWTH),
        (f"the median canary's time grew to {latency:.0%}, allowed {LATENCY_GROWTH:.0%}", latency <= LATENCY_GROWTH),
        (f"the slowest canary took {slowest:.1f} times its quiet time and a step", slowest <= CANARY_FACTOR),
    ]


def plot(samples: Sequence[Sample], title: str, value: Callable[[Sample], float], unit: str) -> str:
    """A curve over the hours, as SVG."""
    points = [(one.at / 3600, value(one)) for one in samples]
    last, most = points[-1][0], max(max(y for _, y in points), 1e-9) * 1.1
    parts = [text(24, 28, title, kind="head")]

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / last * (WIDTH - LEFT - 24), HEIGHT - BOTTOM - y / most * (HEIGHT - TOP - BOTTOM)

    for step in range(5):
        y = most * step / 4
        parts.append(line([place(0, y), place(last, y)], LIGHT.edge))
        parts.append(text(LEFT - 8, place(0, y)[1] + 4, f"{y:,.3g} {unit}", anchor="end", size=11))
        x = last * step / 4
        parts.append(text(place(x, 0)[0], HEIGHT - BOTTOM + 18, f"{x:.2g} h", anchor="middle", size=11))
    parts.append(line([place(x, y) for x, y in points], LIGHT.accent, width=1.5))
    return picture(LIGHT, WIDTH, HEIGHT, title, parts)


def write(samples: Sequence[Sample], folder: Path) -> None:
    """Figures and plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.json").write_text(json.dumps([asdict(one) for one in samples]))
    plots: dict[str, tuple[str, Callable[[Sample], float], str]] = {
        "memory": ("Memory of the server's processes", lambda one: one.memory / 2**20, "MiB"),
        "latency": ("Median canary, beside its quiet time", lambda one: one.canary, "x"),
        "slowest": ("Slowest canary, beside its quiet time and a step", lambda one: one.slowest_canary, "x"),
        "descriptors": ("Descriptors", lambda one: one.descriptors, ""),
    }
    for name, (title, value, unit) in plots.items():
        (folder / f"{name}.svg").write_text(plot(samples, title, value, unit))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=math.inf, help="hostile requests per second at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "tiny")
        command = serve_command(str(model), folder, "--api-workers", "2", "--log-level", "error")
        with running(command, folder) as target:
            soak = Soak(target, model.name, given.seed, 3600 * given.hours, given.rate)
            uvloop.run(soak.run())
            is_alive = target.is_alive()
    write(soak.samples, given.out)
    part = soak.part
    print(f"{part.requests:,} hostile requests, {part.canaries:,} canaries: {part.wrong_canaries} wrong,", end=" ")
    print(f"{part.refused_canaries} without an answer; the server is {'alive' if is_alive else 'dead'}; {given.out}")
    all_kept = is_alive and not part.wrong_canaries and not part.faulty
    for sentence, kept in verdict(soak.samples):
        print(f"{'kept' if kept else 'broken'}: {sentence}")
        all_kept &= kept
    return 0 if all_kept else 1


if __name__ == "__main__":
    sys.exit(main())
