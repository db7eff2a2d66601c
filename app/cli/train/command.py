"""`tessera train`: from its options to a trained model or adapter."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tessera.app.cli.hub import ModelFolder, builtin_model, find_model
from tessera.app.cli.train.options import (
    AdapterOptions,
    DataOptions,
    MethodOptions,
    OptimisationOptions,
    TrainResourceOptions,
)
from tessera.app.cli.train.plot import svg_plot, terminal_plot
from tessera.app.training.dataset import Dataset, DatasetReader
from tessera.engine.contract.errors import ConfigError, TesseraError
from tessera.engine.models.config import load_config
from tessera.engine.runner.devices import select_device
from tessera.engine.tensor import CPU, bfloat16, float32
from tessera.engine.training.examples import AnyItem, ExampleOrder, Item
from tessera.engine.training.lora import LoraSettings
from tessera.engine.training.plan import PlannedTraining, TrainingPlan, plan_preferences, plan_supervised
from tessera.engine.training.run import METRICS_FILE, RunSettings, StepRecord, TrainingRun
from tessera.options.command_options import GivenOptions

EXIT_FAILURE = 1
MODEL, ADAPTER, PLOT = "model", "adapter", "loss.svg"
FULL_RATE, LORA_RATE = 2e-5, 2e-4


def train_command(given: GivenOptions) -> int:
    """-> exit code: 0, or 1 where the training failed. Raises ConfigError: options, model or data cannot be used."""
    try:
        return _Training(given).run()
    except ConfigError:
        raise
    except (TesseraError, OSError) as error:
        print(f"tessera train: {error}", file=sys.stderr)
        return EXIT_FAILURE


class _Training:
    def __init__(self, given: GivenOptions) -> None:
        self._given = given
        self._data = given.make(DataOptions)
        self._method = given.make(MethodOptions)
        self._adapter = given.make(AdapterOptions)
        self._optimisation = given.make(OptimisationOptions)
        self._resources = given.make(TrainResourceOptions)
        self._console = Console(stderr=True)
        self._device, self._reason = select_device(self._resources.device)

    def run(self) -> int:
        self._refuse_idle_options()
        chats, output = self._checked_places()
        found = builtin_model() if self._data.model is None else find_model(self._data.model)
        if load_config(found.path).quantisation is not None and (not self._adapter.lora or self._adapter.merge):
            raise ConfigError(f"train: {found.name} is quantised; an adapter of it can be trained: --lora --no-merge")
        reader = DatasetReader(found.path, found.name, max_length=self._resources.max_length)
        is_dpo = self._method.method == "dpo"
        read: Callable[[Path], Dataset[Any]] = reader.preferences if is_dpo else reader.examples
        plan: Callable[..., PlannedTraining[Any]] = plan_preferences if is_dpo else plan_supervised
        items, held_out = (
            self._noted(read(path), path, reader.max_length) if path is not None else []
            for path in (chats, self._data.validation_data)
        )
        planned = plan(self._plan(found, len(items), reader.max_length), output, items, held_out)
        return self._train(planned, found, output, items)

    def _refuse_idle_options(self) -> None:
        """Those of an adapter without --lora, with which all weights would be trained, and beta without dpo."""
        fields = [] if self._adapter.lora else [field for field in AdapterOptions.__struct_fields__ if field != "lora"]
        needed = dict.fromkeys(fields, "--lora") | ({} if self._method.method == "dpo" else {"beta": "--method dpo"})
        for field, option in needed.items():
            if self._given.source(field) == "command line":
                raise ConfigError(f"train: --{field.replace('_', '-')} goes with {option}")

    def _checked_places(self) -> tuple[Path, Path]:
        """-> the data and the output folder."""
        data, output = self._data.data, self._data.output
        if data is None or output is None:
            raise ConfigError(f"train: give --{'data FILE' if data is None else 'output FOLDER'}")
        if not self._data.resume and (output / METRICS_FILE).exists():
            raise ConfigError(
                f"train: {output} holds a training already; --resume goes on with it, or give another --output"
            )
        existing = next(place for place in (output, *output.absolute().parents) if place.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            reason = "cannot be written to" if existing.is_dir() else "is a file"
            raise ConfigError(f"train: --output {output} cannot be made: {existing} {reason}")
        return data, output

    def _noted(self, found: Dataset[AnyItem], path: Path, max_length: int) -> list[AnyItem]:
        """The examples; what was cut is said."""
        if found.num_cut:
            self._say(
                f"{path}: cut at {max_length} tokens: {found.num_cut} of "
                f"{len(found.items) + found.num_dropped} chats, of which {found.num_dropped} have nothing left to learn"
            )
        return found.items

    def _plan(self, found: ModelFolder, num_examples: int, max_length: int) -> TrainingPlan:
        adapter, optimisation, resources = self._adapter, self._optimisation, self._resources
        return TrainingPlan(
            model=found.path,
            name=found.name,
            lora=LoraSettings(adapter.lora_rank, adapter.lora_alpha, adapter.lora_targets, adapter.rslora)
            if adapter.lora
            else None,
            run=self._run_settings(num_examples),
            max_length=max_length,
            dtype=self._dtype(),
            weight_decay=optimisation.weight_decay,
            eight_bit=optimisation.optimizer == "adamw_8bit",
            max_gradient_norm=optimisation.max_gradient_norm,
            micro_batch_tokens=resources.micro_batch_tokens,
            checkpoint_layers=resources.checkpoint_layers,
            beta=self._method.beta,
            device=self._device,
        )

    def _dtype(self) -> np.dtype[Any]:
        given = self._resources.dtype
        if given == "auto":
            return float32 if self._device is CPU else bfloat16
        return bfloat16 if given == "bfloat16" else float32

    def _train(self, planned: PlannedTraining[Any], found: ModelFolder, output: Path, examples: Sequence[Item]) -> int:
        adapter, run = self._adapter, planned.run
        settings = run.settings
        if self._data.resume and run.resume():
            self._say(f"resuming after step {run.step} of {settings.num_steps}")
        num_tokens = sum(example.num_tokens for example in examples)
        what = "preferences" if self._method.method == "dpo" else "chats"
        self._say(
            f"{found.name}: {planned.num_trained:,} parameters are trained on {len(examples):,} {what}, "
            f"{num_tokens:,} tokens, in {settings.num_steps:,} steps"
        )
        if self._device is not CPU:
            self._say(f"on {self._device}: {self._reason}")
        seconds = self._run(run)
        if adapter.lora:
            planned.save_adapter(output / ADAPTER, self._data.model or found.name)
        if not adapter.lora or adapter.merge:
            planned.save_model(output / MODEL)
        self._report(run, output, seconds)
        return 0

    def _run_settings(self, num_examples: int) -> RunSettings:
        optimisation, resources = self._optimisation, self._resources
        order = ExampleOrder(num_examples, optimisation.batch_size, optimisation.seed)
        rate = optimisation.learning_rate
        return RunSettings(
            num_steps=optimisation.max_steps or optimisation.epochs * order.steps_per_epoch,
            batch_size=optimisation.batch_size,
            learning_rate=rate if rate is not None else LORA_RATE if self._adapter.lora else FULL_RATE,
            schedule=optimisation.schedule,
            warmup_share=optimisation.warmup_share,
            seed=optimisation.seed,
            save_every=resources.save_every,
            evaluate_every=resources.evaluate_every,
        )

    def _run(self, run: TrainingRun[Any]) -> float:
        """With a bar on a terminal, else a line now and then; -> seconds."""
        start = time.perf_counter()
        if not self._console.is_terminal:
            every = max(run.settings.num_steps // 20, 1)

            def print_line(record: StepRecord) -> None:
                if record.step % every == 0 or record.step == run.settings.num_steps:
                    self._say(f"step {record.step} of {run.settings.num_steps}: {_described(record)}")

            run.run(print_line)
            return time.perf_counter() - start
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("", total=run.settings.num_steps, completed=run.step)
            run.run(lambda record: progress.update(task, completed=record.step, description=_described(record)))
        return time.perf_counter() - start

    def _report(self, run: TrainingRun[Any], output: Path, seconds: float) -> None:
        points = [(record.step, record.loss) for record in run.records]
        validation = [
            (record.step, record.validation_loss) for record in run.records if record.validation_loss is not None
        ]
        (output / PLOT).write_text(svg_plot(f"Loss of {output.name}", {"training": points, "validation": validation}))
        self._say(terminal_plot(points))
        self._say(f"done in {seconds:.0f} s; losses are in {output / METRICS_FILE} and {output / PLOT}")
        if self._adapter.lora:
            self._say(f"the adapter is in {output / ADAPTER}")
        if (output / MODEL).is_dir():
            self._say(f"serve it: tessera serve {output / MODEL}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _described(record: StepRecord) -> str:
    rate = record.num_tokens / record.seconds if record.seconds else 0.0
    held_out = "" if record.validation_loss is None else f", validation {record.validation_loss:.4f}"
    return f"loss {record.loss:.4f}{held_out}, {rate:,.0f} tokens/s"
