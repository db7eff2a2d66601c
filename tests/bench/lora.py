"""Decode steps with LoRA adapters beside the same steps without.

    python -m tests.bench.lora llama-8b --rows 64 --adapters 16 --rank 16

runs the model runner alone, with random weights and adapters on all projections, which the rows of a step share evenly.
It prints the time of a step without adapters, with one for every row, and with one for half of the rows, and the share
of the base's throughput that is left. The last line is JSON: those shares. With `--variants` the same is measured once
more for each choice that `tessera.engine.ops.cuda.lora.choices` has made, the other way round, or for those that are
named: `--variants FUSES_NORMS FUSES_PRODUCTS,FUSES_GATES` is two more runs, the second with two choices turned round.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.adapters.modules import AdaptableModule, adaptable_modules
from tessera.engine.adapters.reader import Adapter, ModuleAdapter
from tessera.engine.contract.config import EngineConfig
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.ops.cuda.lora import choices
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.devices import select_device
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import Device
from tests.bench.models import CONFIGS, write_model
from tests.bench.steps import BLOCK_SIZE, STEPS, DecodeSteps, measure_batches
from tests.support.paths import BUILTIN

BUILTIN_NAME = "builtin"
CHOICES = ("FUSES_NORMS", "BEGINS_NEXT", "FUSES_PRODUCTS", "FUSES_PRODUCTS,FUSES_GATES")


def random_adapter(model: ModelConfig, rank: int, seed: int) -> Adapter:
    """On every projection; small, so that activations stay as they are."""
    random = np.random.default_rng(seed)

    def module(place: AdaptableModule) -> ModuleAdapter:
        a = random.standard_normal((rank, place.columns), np.float32) / np.float32(place.columns) ** 0.5
        b = random.standard_normal((place.rows, rank), np.float32) * np.float32(1e-3)
        return ModuleAdapter(place, a, b, 1.0)

    places = {id(place): place for place in adaptable_modules(model).values()}
    return Adapter(tuple(map(module, places.values())), rank, bytes([seed]), "")


def adapted_batches(runner: ModelRunner, rows: int, context: int, slots: np.ndarray[Any, Any]) -> Iterator[StepBatch]:
    for batch in DecodeSteps(runner, rows, context).batches():
        batch.adapter_slots = slots if (slots >= 0).any() else None
        yield batch


def make_runner(options: argparse.Namespace, folder: Path, device: Device) -> ModelRunner:
    """With an adapter in every slot; its graphs have the choices of now."""
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        block_size=BLOCK_SIZE,
        max_num_seqs=options.rows,
        num_kv_blocks=options.rows * -(-(options.context + STEPS + 8) // BLOCK_SIZE),
        max_loras=options.adapters,
    )
    model = load_config(folder)
    runner = ModelRunner(config, model, device, make_ops(device), max_lora_rank=options.rank)
    first = next(adapted_batches(runner, options.rows, options.context, slots_of(options)))
    first.adapter_loads = [(slot, random_adapter(model, options.rank, slot)) for slot in range(options.adapters)]
    runner.execute(first)
    return runner


def slots_of(options: argparse.Namespace) -> np.ndarray[Any, Any]:
    return np.arange(options.rows, dtype=np.int32) % options.adapters


def turn(names: list[str]) -> None:
    for name in names:
        setattr(choices, name, not getattr(choices, name))


def measure(runner: ModelRunner, options: argparse.Namespace, title: str) -> dict[str, float]:
    """-> the shares of the base's throughput, 1 for the base itself."""
    slots = slots_of(options)
    base, shares = 0.0, {}
    for name, chosen in (
        ("base", np.full_like(slots, -1)),
        ("adapters", slots),
        ("half of the rows", np.where(np.arange(options.rows) % 2, slots, -1)),
    ):
        found = measure_batches(runner, adapted_batches(runner, options.rows, options.context, chosen))
        base = base or found["step us"]
        step, host = found["step us"], found["host us"]
        shares[name] = round(base / step, 4)
        print(f"{title}{name}: step {step:.0f} us, host {host:.0f} us, {base / step:.1%} of the base", flush=True)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.lora", description=__doc__)
    parser.add_argument("model", choices=(BUILTIN_NAME, *CONFIGS))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--variants", nargs="*", metavar="CHOICE[,CHOICE]", help="also with these turned round, or each"
    )
    options = parser.parse_args()
    device, _ = select_device(options.device)
    figures: dict[str, float | str | int] = {"model": options.model, "rows": options.rows}
    with tempfile.TemporaryDirectory() as work:
        folder = BUILTIN if options.model == BUILTIN_NAME else write_model(Path(work), options.model)
        figures.update(measure(make_runner(options, folder, device), options, ""))
        for variant in () if options.variants is None else options.variants or CHOICES:
            names = variant.split(",")
            turn(names)
            title = "".join(f"{name} = {getattr(choices, name)}, " for name in names)
            shares = measure(make_runner(options, folder, device), options, title)
            turn(names)
            figures.update({title + name: share for name, share in shares.items() if name != "base"})
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
