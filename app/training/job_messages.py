"""Messages between the server and the process of a fine-tuning job: lines of JSON on its standard streams."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tessera.engine.contract.config import DeviceName

Method = Literal["supervised", "dpo"]
STOP = b"stop\n"  # on standard input, after the launch: save a checkpoint and end


class JobLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of standard input, which then stays open: at its end the process ends at once.

    Attributes:
        folder: of the job, with `training.jsonl`, perhaps `validation.jsonl`, and all that the process writes.
        model: folder of the base model; `name` is its name.
        chat_template: file that replaces the model's own.
        num_epochs, batch_size, rate_multiplier, beta: None leaves the choice to the process.
        known_step: the last step that the server knows of; those after it are told again.
        share: most of the machine's CPU time, and of the GPU's time; `num_cpus` is the machine's.
        device: "auto", "cuda" or "cpu", as the model's.
    """

    folder: str
    model: str
    name: str
    method: Method
    seed: int
    share: float
    num_cpus: int
    device: DeviceName = "cpu"
    known_step: int = 0
    chat_template: str | None = None
    num_epochs: int | None = None
    batch_size: int | None = None
    rate_multiplier: float | None = None
    beta: float | None = None


class Began(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The files are valid, and the steps begin; `notes` are for the job's events, `device` is "the CPU" or a GPU."""

    num_examples: int
    num_epoch_tokens: int
    num_steps: int
    num_epochs: int
    batch_size: int
    rate_multiplier: float
    beta: float
    step: int
    device: str
    notes: list[str]


class StepTaken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """See `StepRecord`; `checkpoint` says that the adapter was saved in `checkpoint_folder(step)`."""

    step: int
    loss: float
    num_tokens: int
    seconds: float
    validation_loss: float | None
    checkpoint: bool


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """As asked, with a checkpoint."""

    step: int


class Succeeded(msgspec.Struct, frozen=True, tag=True):
    """The adapter is in the folder's `adapter`."""

    num_trained_tokens: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """For good: it would fail again."""

    code: str
    message: str
    param: str | None


FromJob: TypeAlias = Began | StepTaken | Stopped | Succeeded | Failed

ADAPTER_FOLDER = "adapter"
CHECKPOINT_PREFIX = "adapter-"
TRAINING_FILE, VALIDATION_FILE = "training.jsonl", "validation.jsonl"
NUM_CHECKPOINTS = 3  # of the last epochs, that are kept


def checkpoint_folder(step: int) -> str:
    """In the job's folder, of the adapter after a step."""
    return f"{CHECKPOINT_PREFIX}{step}"
