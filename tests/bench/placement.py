"""Where the blocks of a decode step's products find room: other shared memory and other variants of each product.

    python -m tests.bench.placement llama-8b.fp8 1 [--seconds 20] [--kv-cache-dtype fp8]

A block begins where a multiprocessor has shared memory left, so that what one product asks for decides where those
behind it go: a product that is fast alone may be slow in its step, and the other way round. From what is chosen today
on one product after the other, the largest first, gets each change by itself: the step is recorded anew, and a change
that makes it faster stays. Prints each of them, and at the end the launches of the products that changed, before and
after. Sums of another variant may differ in their last bits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

from tessera.engine.contract.config import QuantizationName
from tessera.engine.contract.errors import DeviceError
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.runner.cuda_graphs import StepGraph, StepGraphs
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.step_inputs import StepShape
from tests.bench.product_changes import (
    HALF,
    RESERVED_BYTES,
    SHARED_MEMORY,
    Change,
    Changes,
    Launch,
    Product,
    changed,
    products_of,
    share_bytes,
    values_for,
)
from tests.bench.steps import MODELS, STEPS, DecodeSteps, engine_config, make_runner, measure_batches

NOISE = 0.001  # of a step's time
CONFIRMATIONS = 2
LOOKS = 4  # at changes, until the best is measured again: a card slows down as it gets warm
LAST_ROUNDS = 3


class Placement:
    """A decode step of `rows` sequences, which it records with changes and measures."""

    def __init__(self, runner: ModelRunner, rows: int, context: int) -> None:
        self._runner = runner
        batches = DecodeSteps(runner, rows, context).batches()
        self._batches = list(itertools.islice(batches, STEPS))
        graphs = runner._graphs
        recorded = graphs.find(self._batches[0])
        assert recorded is not None
        self._inputs = recorded.inputs
        self._places = [
            (steps, shape)
            for steps in (graphs._steps, graphs._short_steps)
            for shape, step in steps.items()
            if step is recorded
        ]

    @property
    def device(self) -> CudaDevice:
        assert isinstance(self._runner.device, CudaDevice)
        return self._runner.device

    def record(self, changes: Changes) -> StepGraph:
        """Raises: DeviceError where the device cannot run a product so."""
        with changed(changes), self._chosen_anew(), self.device.capture() as finish:
            logits = self._runner._forward(self._inputs)
        return StepGraph(self._inputs, logits, finish())

    def launches(self, changes: Changes) -> list[Launch]:
        """What `record` records."""
        found: list[Launch] = []

        def write_down(_: CudaDevice, *launch: Any) -> None:
            found.append(Launch(*launch))

        with mock.patch.object(CudaDevice, "launch", write_down), changed(changes), self._chosen_anew():
            self._runner._forward(self._inputs)
        return found

    def measure(self, step: StepGraph) -> float:
        """Microseconds."""
        for steps, shape in self._places:
            steps[shape] = step
        return measure_batches(self._runner, iter(self._batches))["step us"]

    @contextlib.contextmanager
    def _chosen_anew(self) -> Iterator[None]:
        """Choices of kernels are remembered."""
        ops = self._runner.ops
        assert isinstance(ops, CudaOps)
        for chooser in (ops.linear_kernels, ops.fp8_kernels):
            chooser.restrict()
        try:
            yield
        finally:
            for chooser in (ops.linear_kernels, ops.fp8_kernels):
                chooser.restrict()


class Variant(NamedTuple):
    """What is changed of a product, to what, and the shared memory that a block then uses."""

    what: str
    value: Any
    used_bytes: int


class Room(NamedTuple):
    """What blocks ask for, and the most that they may use, where there is a variant."""

    asked: int
    most: int | None = None


class Search:
    """By coordinate descent.

    Attributes:
        products: of a step as it is today, the largest first, each with its launches.
        base, best: recordings of today's step, and of the fastest that was found, which has `changes`.
        is_over: whether the time was over before all was tried.
    """

    def __init__(self, placement: Placement, seconds: float) -> None:
        self._placement = placement
        self.products = products_of(placement.launches({}))
        self._variants = self._find_variants()
        self._end = time.perf_counter() + seconds
        self.is_over = False
        self.changes: Changes = {}
        self.base = self.best = placement.record({})
        self._tried = {_step_form(placement.launches({}))}
        self._best_us = min(placement.measure(self.base) for _ in range(CONFIRMATIONS))
        self._looks = 0

    def _values(self, product: Product) -> list[tuple[str, Any]]:
        now = [(what, None) for changed, what in self.changes if changed == product]  # as it is today
        return [*values_for(self.products[product][0], self._placement.device), *now]

    def _find_variants(self) -> dict[Product, list[Variant]]:
        """Also compiles them, all at once."""
        found: dict[Product, list[Variant]] = {product: [] for product in self.products}
        kernels = set()
        for product, (first, *_) in self.products.items():
            for what, value in values_for(first, self._placement.device):
                if what == SHARED_MEMORY:
                    continue
                launches = self._placement.launches({(product, what): value})
                kernels |= {(launch.spec, launch.template) for launch in launches}
                used = [launch.used_bytes for launch in launches if launch.product == product]
                found[product].append(Variant(what, value, max(used, default=0)))
        self._placement.device.compile(sorted(kernels, key=lambda kernel: (kernel[0].name, kernel[1])))
        return found

    def run(self) -> None:
        """Passes over all products until one finds nothing, or the time is over."""
        for name, changes in self._of_kinds():
            self._try(name, changes)
        found = True
        while found:
            found = False
            for product in self.products:
                for what, value in self._values(product):
                    found |= self._try(f"{product} {what} {value}", {(product, what): value})

    def _of_kinds(self) -> Iterator[tuple[str, Changes]]:
        """Products behind a norm and the others ask for half, or for no more than they use; or one kind for half, and
        the other has room beside it. Of such changes each alone may be none."""
        half = share_bytes(self._placement.device, HALF)
        beside = self._placement.device.max_shared_bytes - half - 2 * RESERVED_BYTES
        for of_others, of_normed in itertools.product((0, half), repeat=2):
            name = f"{SHARED_MEMORY} behind norms {of_normed}, of others {of_others}"
            yield name, self._of_each(Room(of_others), Room(of_normed))
        large, small = Room(half, half), Room(0, beside)
        yield "others just over half, those behind norms beside them", self._of_each(large, small)
        yield "products behind norms just over half, others beside them", self._of_each(small, large)

    def _of_each(self, of_others: Room, of_normed: Room) -> Changes:
        changes: dict[Change, Any] = {}
        for product, (first, *_) in self.products.items():
            room = of_normed if first.normed else of_others
            changes[product, SHARED_MEMORY] = room.asked
            if room.most is not None and first.used_bytes > room.most:
                fitting = [variant for variant in self._variants[product] if variant.used_bytes <= room.most]
                for what, value, _ in sorted(fitting, key=lambda variant: variant.used_bytes)[-1:]:
                    changes[product, what] = value
        return changes

    def _try(self, name: str, more: Changes) -> bool:
        """Whether the best with these changes is faster, which it then is."""
        self.is_over = self.is_over or time.perf_counter() > self._end
        if self.is_over:
            return False
        changes = {key: value for key, value in {**self.changes, **more}.items() if value is not None}
        launches = _step_form(self._placement.launches(changes))
        if launches in self._tried:
            return False
        self._tried.add(launches)
        try:
            step = self._placement.record(changes)
        except DeviceError as error:
            print(f"{name}: {error}", flush=True)
            return False
        measured = self._faster(step)
        if measured is None:
            return False
        print(f"{measured[0]:9.1f} us instead of {measured[1]:.1f}: {name}", flush=True)
        self.changes, self.best, self._best_us = changes, step, measured[0]
        return True

    def _faster(self, step: StepGraph) -> tuple[float, float] | None:
        """Microseconds of a step and of the best, if it is faster by more than noise each time."""
        measure = self._placement.measure
        if self._looks % LOOKS == 0:
            self._best_us = measure(self.best)
        self._looks += 1
        most = 1 - NOISE
        if measure(step) >= self._best_us * most:
            return None
        pairs = [(measure(step), measure(self.best)) for _ in range(CONFIRMATIONS)]
        return pairs[-1] if all(us < best_us * most for us, best_us in pairs) else None


@contextlib.contextmanager
def only_decodes(rows: int) -> Iterator[None]:
    """Of the steps with a CUDA graph only the one of so many rows is recorded."""
    shapes = StepGraphs.shapes

    def of_rows(graphs: StepGraphs) -> list[StepShape]:
        return [shape for shape in shapes(graphs) if shape.is_decode and shape.num_seqs >= rows][-1:]

    with mock.patch.object(StepGraphs, "shapes", of_rows):
        yield


def scan(runner: ModelRunner, rows: int, context: int, seconds: float) -> None:
    """Search, and print what is found."""
    placement = Placement(runner, rows, context)
    search = Search(placement, seconds)
    for product, launches in search.products.items():
        print(f"{len(launches):5} x {product} {_forms(launches)}")
    search.run()
    times = [(placement.measure(search.base), placement.measure(search.best)) for _ in range(LAST_ROUNDS)]
    base, best = (statistics.median(each) for each in zip(*times, strict=True))
    over = f"; not all was tried in {seconds:g} s" if search.is_over else ""
    print(f"now {base:.1f} us, best {best:.1f} us ({best / base - 1:+.1%}){over}")
    found = products_of(placement.launches(search.changes))
    for product, launches in search.products.items():
        if product not in found or _forms(found[product]) != _forms(launches):
            print(f"{product}\n      now   {_forms(launches)}\n      best  {_forms(found.get(product, []))}")


def _step_form(launches: list[Launch]) -> Hashable:
    return tuple((launch.product, launch.form) for launch in launches)


def _forms(launches: list[Launch]) -> str:
    return "; ".join(dict.fromkeys(launch.form for launch in launches))


def step_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Options that name a decode step, for `load`."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{module}", description=description)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("rows", type=int, help="sequences in a step")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--quantization", choices=get_args(QuantizationName), default="none")
    return parser


def load(options: argparse.Namespace) -> ModelRunner:
    """The model, with the graph of that step alone."""
    with tempfile.TemporaryDirectory() as work, only_decodes(options.rows):
        settings = {"kv_cache_dtype": options.kv_cache_dtype, "quantization": options.quantization}
        config = engine_config(options.model, Path(work), **settings)
        return make_runner(config, CudaDevice())


def main() -> None:
    parser = step_parser("placement", __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the search (default: %(default)s)")
    options = parser.parse_args()
    scan(load(options), options.rows, options.context, options.seconds)


if __name__ == "__main__":
    main()
