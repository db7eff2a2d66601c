"""A training from its first step to its last, with checkpoints and a record of losses; killed, it can be resumed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic

from tessera.engine.contract.errors import ConfigError
from tessera.engine.training.checkpoint import Checkpoints, load_checkpoint
from tessera.engine.training.examples import AnyItem, Batches, OrderedBatches
from tessera.engine.training.schedule import ScheduleName, share_of_peak
from tessera.engine.training.trainer import BaseTrainer

METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunSettings:
    """Attributes:
    learning_rate: the peak.
    warmup_share: of all steps, in which the learning rate rises.
    save_every: steps between checkpoints; there is one at the end in any case.
    evaluate_every: steps between losses of the validation examples; 0 is at the end alone.
    """

    num_steps: int
    batch_size: int
    learning_rate: float
    schedule: ScheduleName = "cosine"
    warmup_share: float = 0.03
    seed: int = 0
    save_every: int = 100
    evaluate_every: int = 0

    @property
    def num_warmup_steps(self) -> int:
        return round(self.warmup_share * self.num_steps)


@dataclass(frozen=True)
class StepRecord:
    """A line of the record of losses.

    Attributes:
        step: counted from 1.
        seconds: that the step took.
        validation_loss: after the step, where it was measured.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    num_tokens: int
    seconds: float
    validation_loss: float | None = None


class TrainingRun(Generic[AnyItem]):
    """One training in its folder.

    Args:
        examples: in an order that the seed decides on, or batches that are made by others.
        identity: what else a checkpoint must agree on to be resumed, such as the model and the optimiser's settings.
    """

    def __init__(
        self,
        folder: Path,
        trainer: BaseTrainer[AnyItem],
        examples: Sequence[AnyItem] | Batches[AnyItem],
        settings: RunSettings,
        *,
        validation: Sequence[AnyItem] = (),
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.records: list[StepRecord] = []
        self._trainer = trainer
        self._validation = validation
        if isinstance(examples, Sequence):
            examples = OrderedBatches(examples, settings.batch_size, settings.seed)
        self._batches: Batches[AnyItem] = examples
        self._checkpoints = Checkpoints(folder / CHECKPOINTS)
        unimportant = ("save_every", "evaluate_every")
        self._identity: dict[str, Any] = {
            **{name: value for name, value in asdict(settings).items() if name not in unimportant},
            "examples": examples.digest,
            **(identity or {}),
        }

    @property
    def step(self) -> int:
        """How many are done."""
        return self._trainer.optimizer.step

    def resume(self) -> int:
        """Go to the newest checkpoint; -> its step, 0 where there is none.

        Raises: ConfigError naming a setting in which the checkpoint's training differs from this one.
        """
        newest = self._checkpoints.newest()
        if newest is None:
            return 0
        tensors, state = load_checkpoint(newest, self._trainer.decoder.functions.device)
        before = state.get("identity")
        before = before if isinstance(before, dict) else {}
        for name in {**self._identity, **before}:
            found, value = before.get(name), self._identity.get(name)
            if found != json.loads(json.dumps(value)):
                raise ConfigError(
                    f"{newest} is of another training: its {name} is {_shown(found)}, and here it is {_shown(value)}"
                )
        self._trainer.optimizer.restore(tensors, state["step"])
        path = self.folder / METRICS_FILE
        lines = path.read_text().splitlines() if path.is_file() else []
        self.records = [record for line in lines if (record := _record_of(line)) is not None]
        self.records = [record for record in self.records if record.step <= self.step]
        return self.step

    def run(
        self,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        *,
        is_save_due: Callable[[], bool] = lambda: False,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """All steps that are left. Raises: TesseraError where the loss is not finite; OSError.

        Args:
            is_save_due: asked after each step; a checkpoint beside those of `save_every`.
            is_stopped: asked after each step; ends with a checkpoint.
        """
        settings = self.settings
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rewrite_metrics()
        with (self.folder / METRICS_FILE).open("a") as file:
            while self.step < settings.num_steps:
                record = self._take_step()
                self.records.append(record)
                file.write(json.dumps(asdict(record)) + "\n")
                file.flush()
                stopped = is_stopped()
                is_usual = record.step % settings.save_every == 0 or record.step == settings.num_steps
                if is_usual or stopped or is_save_due():
                    os.fsync(file.fileno())
                    tensors = dict(self._trainer.optimizer.tensors())
                    self._checkpoints.save(record.step, tensors, {"identity": self._identity})
                on_step(record)
                if stopped:
                    return

    def _take_step(self) -> StepRecord:
        settings, start = self.settings, time.perf_counter()
        share = share_of_peak(settings.schedule, self.step, settings.num_steps, settings.num_warmup_steps)
        examples = self._batches.batch(self.step)
        rate = settings.learning_rate * share
        result = self._trainer.step(examples, rate)
        seconds = time.perf_counter() - start
        due = settings.evaluate_every and self.step % settings.evaluate_every == 0
        validation_loss = None
        if self._validation and (due or self.step == settings.num_steps):
            validation_loss = self._trainer.evaluate(self._validation)
        return StepRecord(
            step=self.step,
            loss=result.loss,
            learning_rate=rate,
            gradient_norm=result.gradient_norm,
            num_tokens=result.num_tokens,
            seconds=seconds,
            validation_loss=validation_loss,
        )

    def _rewrite_metrics(self) -> None:
        """Without lines of steps that are taken again."""
        path = self.folder / METRICS_FILE
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(json.dumps(asdict(record)) + "\n" for record in self.records))
        partial.replace(path)


def _record_of(line: str) -> StepRecord | None:
    """None for a line that was cut off."""
    try:
        return StepRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
