"""The process of one fine-tuning job: `python -m tessera.app.training.job_process`.

It writes checkpoints as it goes, so that it may be killed at any time: started again with the same launch, it ends with
the same weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tessera.app.training.cpu_share import CpuShare
from tessera.app.training.dataset import Dataset, DatasetReader
from tessera.app.training.job_messages import (
    ADAPTER_FOLDER,
    CHECKPOINT_PREFIX,
    NUM_CHECKPOINTS,
    STOP,
    TRAINING_FILE,
    VALIDATION_FILE,
    Began,
    Failed,
    FromJob,
    JobLaunch,
    StepTaken,
    Stopped,
    Succeeded,
    checkpoint_folder,
)
from tessera.engine.contract.config import FINE_TUNED_RANK
from tessera.engine.contract.errors import ConfigError, OutOfMemoryError, TesseraError
from tessera.engine.models.config import load_config
from tessera.engine.runner.devices import device_description, free_memory, select_device
from tessera.engine.tensor import CPU, Device, bfloat16, float32
from tessera.engine.training.example_files import load_examples, load_preferences, save_items
from tessera.engine.training.examples import ExampleOrder
from tessera.engine.training.lora import LoraSettings
from tessera.engine.training.parameters import check_trainable
from tessera.engine.training.plan import PlannedTraining, TrainingPlan, plan_preferences, plan_supervised
from tessera.engine.training.run import RunSettings, StepRecord

NUM_EPOCHS = 3
MAX_BATCH = 16  # chosen by itself; an eighth of the examples where that is less
RATE, RATE_WIDTH, RATE_POWER = 5e-4, 2000, 0.781  # of LoRA, by the width (Schulman et al. 2025, LoRA Without Regret)
DPO_RATE_SHARE = 0.1
BETA = 0.1
WARMUP_SHARE = 0.03
MICRO_BATCH_TOKENS = 2048
MAX_TOKENS = 2**28  # of one file; they take eight bytes each, in memory and in the job's folder
SAVE_INTERVAL = 30.0  # seconds between checkpoints within an epoch
LARGE_MODEL = 2**29  # bytes of weights; of larger ones the layers are computed twice
MEMORY_FACTOR = 1.3  # of what the weights take, in float32 on the CPU, in bfloat16 on a GPU
GPU_HEADROOM = 2 * 2**30  # bytes of activations, logits of a chunk, and the context
EXIT_LOST = 1
STDIN_FD = 0
LOCK_FILE = "lock"  # in the job's folder


class JobProcess:
    def __init__(self, launch: JobLaunch, send: Callable[[FromJob], None], is_stopped: Callable[[], bool]) -> None:
        self._launch = launch
        self._folder = Path(launch.folder)
        self._send = send
        self._is_stopped = is_stopped
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Send what happens, `Failed` included."""
        try:
            self._run()
        except _DataError as error:
            self._send(Failed(f"invalid_{error.param}", str(error), error.param))
        except ConfigError as error:
            self._send(Failed("model_not_available", str(error), "model"))
        except (MemoryError, OutOfMemoryError):
            self._send(Failed("out_of_memory", "The training needs more memory than there is.", None))
        except TesseraError as error:
            self._send(Failed("training_failed", str(error), None))
        except OSError as error:  # it may do better later
            print(f"a fine-tuning job stops: {error}", file=sys.stderr)

    def _run(self) -> None:
        launch = self._launch
        config = load_config(Path(launch.model))
        check_trainable(config, launch.name)
        device, _ = select_device(launch.device)
        is_large = self._check_memory(device)
        notes: list[str] = []
        items, held_out, max_length = self._items(notes)
        batch_size = launch.batch_size or max(1, min(MAX_BATCH, len(items) // 8))
        num_epochs = launch.num_epochs or NUM_EPOCHS
        rate_multiplier = launch.rate_multiplier or 1.0
        beta = launch.beta or BETA
        rate = RATE * (RATE_WIDTH / config.hidden_size) ** RATE_POWER
        is_dpo = launch.method == "dpo"
        epoch = ExampleOrder(len(items), batch_size, launch.seed).steps_per_epoch
        plan = TrainingPlan(
            model=Path(launch.model),
            name=launch.name,
            lora=LoraSettings(FINE_TUNED_RANK, 2 * FINE_TUNED_RANK),
            run=RunSettings(
                num_steps=num_epochs * epoch,
                batch_size=batch_size,
                learning_rate=rate * rate_multiplier * (DPO_RATE_SHARE if is_dpo else 1.0),
                warmup_share=WARMUP_SHARE,
                seed=launch.seed,
                save_every=epoch,
                evaluate_every=epoch,
            ),
            max_length=max_length,
            dtype=float32 if device is CPU else bfloat16,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            checkpoint_layers=is_large,
            beta=beta,
            device=device,
            device_share=1.0 if device is CPU else launch.share,  # CPU time has its own bound
        )
        make: Callable[..., PlannedTraining[Any]] = plan_preferences if is_dpo else plan_supervised
        planned = make(plan, self._folder, items, held_out)
        run = planned.run
        run.resume()
        num_tokens = sum(item.num_tokens for item in items)
        self._send(
            Began(
                num_examples=len(items),
                num_epoch_tokens=num_tokens,
                num_steps=plan.run.num_steps,
                num_epochs=num_epochs,
                batch_size=batch_size,
                rate_multiplier=rate_multiplier,
                beta=beta,
                step=run.step,
                device=device_description(device),
                notes=notes,
            )
        )

        def on_step(record: StepRecord) -> None:
            ends_epoch = record.step % epoch == 0
            if ends_epoch and record.step == run.step:
                self._save_checkpoint(planned, record.step)
            self._send(
                StepTaken(
                    step=record.step,
                    loss=record.loss,
                    num_tokens=record.num_tokens,
                    seconds=record.seconds,
                    validation_loss=record.validation_loss,
                    checkpoint=ends_epoch,
                )
            )

        for record in run.records:  # those that the server has not heard of before it, or the process, ended
            if record.step > launch.known_step:
                on_step(record)
        run.run(on_step, is_save_due=self._is_save_due, is_stopped=self._is_stopped)
        if run.step < plan.run.num_steps:
            self._send(Stopped(run.step))
            return
        planned.save_adapter(self._folder / ADAPTER_FOLDER, launch.name)
        self._send(Succeeded(num_tokens * num_epochs))

    def _items(self, notes: list[str]) -> tuple[list[Any], list[Any], int]:
        """Of the two files, and tokens of the longest. Encoded once: a template may show the date."""
        is_dpo = self._launch.method == "dpo"
        load: Callable[[Path], list[Any]] = load_preferences if is_dpo else load_examples
        places = [self._folder / f"{name}.safetensors" for name in ("training", "validation")]
        if not places[1].exists():
            launch = self._launch
            reader = DatasetReader(
                Path(launch.model), launch.name, max_tokens=MAX_TOKENS, chat_template=launch.chat_template
            )
            try:
                for place, name in zip(places, (TRAINING_FILE, VALIDATION_FILE), strict=True):
                    save_items(place, self._read(reader, name, notes))
            finally:
                reader.close()
        items, held_out = map(load, places)
        longest = max(sequence.num_tokens for item in (*items, *held_out) for sequence in item.sequences)
        return items, held_out, longest

    def _read(self, reader: DatasetReader, name: str, notes: list[str]) -> list[Any]:
        path = self._folder / name
        if name == VALIDATION_FILE and not path.exists():
            return []
        param = name.replace(".jsonl", "_file")
        read: Callable[..., Dataset[Any]] = reader.preferences if self._launch.method == "dpo" else reader.examples
        try:
            found = read(path, param)
        except ConfigError as error:
            raise _DataError(str(error), param) from None
        if found.num_cut:
            notes.append(
                f"{found.num_cut} examples of {param} are cut at {reader.max_length} tokens, "
                f"{found.num_dropped} of them left out, as nothing to learn was left"
            )
        return found.items

    def _save_checkpoint(self, planned: PlannedTraining[Any], step: int) -> None:
        """The adapter as it is; the oldest go."""
        planned.save_adapter(self._folder / checkpoint_folder(step), self._launch.name)
        found = sorted(self._folder.glob(f"{CHECKPOINT_PREFIX}*"), key=_step_of)
        for old in found[:-NUM_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)

    def _is_save_due(self) -> bool:
        if time.monotonic() - self._saved_at < SAVE_INTERVAL:
            return False
        self._saved_at = time.monotonic()
        return True

    def _check_memory(self, device: Device) -> bool:
        """Whether the model is large. Raises: ConfigError where it does not fit."""
        folder, name = Path(self._launch.model), self._launch.name
        stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        parameters = stored / (load_config(folder).torch_dtype or float32).itemsize
        if device is CPU:
            needed, available = int(parameters * float32.itemsize * MEMORY_FACTOR), _available_memory()
            place, hint = "memory to be trained, on the CPU", ""
        else:
            needed, available = int(parameters * bfloat16.itemsize * MEMORY_FACTOR) + GPU_HEADROOM, free_memory(device)
            place = f"memory to be trained, on {device_description(device)}"
            hint = " beside the server; a lower --gpu-memory-utilization leaves more"
        if available is not None and needed > available:
            raise ConfigError(
                f"{name} needs about {needed / 2**30:.1f} GiB of {place}, and {available / 2**30:.1f} GiB is "
                f"available{hint}"
            )
        return stored > LARGE_MODEL


class _DataError(ConfigError):
    """A file is at fault, not the model."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(CHECKPOINT_PREFIX))


def _available_memory() -> int | None:
    """Bytes; None where it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def main() -> None:
    # Not sys.stdin: its buffer has a lock, which the listening thread would hold at the end of the process.
    stdin = open(STDIN_FD, "rb", buffering=0, closefd=False)  # noqa: SIM115  for the life of the process
    stdout = sys.stdout.buffer
    launch = msgspec.json.decode(stdin.readline(), type=JobLaunch)
    stopped = threading.Event()
    threading.Thread(target=_listen, args=(stdin, stopped), daemon=True).start()
    with contextlib.suppress(OSError):  # short of memory, this process is to go before the server
        Path("/proc/self/oom_score_adj").write_text("1000")

    def send(message: FromJob) -> None:
        stdout.write(msgspec.json.encode(message) + b"\n")
        stdout.flush()

    with (Path(launch.folder) / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until a process of the same job has ended
        share = CpuShare(launch.share, launch.num_cpus)
        share.start()
        try:
            JobProcess(launch, send, stopped.is_set).run()
        finally:
            share.stop()


def _listen(stdin: io.FileIO, stopped: threading.Event) -> None:
    """Until the server ends, however it ends: this process ends then."""
    while line := stdin.readline():
        if line == STOP:
            stopped.set()
    os._exit(EXIT_LOST)


if __name__ == "__main__":
    main()
