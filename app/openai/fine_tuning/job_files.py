"""The folder of a job: its size, and once it has succeeded its metrics as a CSV file, and what stays of it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shutil
from pathlib import Path

from tessera.app.training.job_messages import ADAPTER_FOLDER, CHECKPOINT_PREFIX

METRICS_FILE = "metrics.jsonl"
COLUMNS = {
    "step": "step",
    "train_loss": "loss",
    "valid_loss": "validation_loss",
    "learning_rate": "learning_rate",
    "gradient_norm": "gradient_norm",
    "tokens": "num_tokens",
    "seconds": "seconds",
}


def metrics_csv(folder: Path) -> bytes:
    """A line a step; empty where a loss was not measured. Raises OSError."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    with (folder / METRICS_FILE).open() as file:
        for line in file:
            record = json.loads(line)
            writer.writerow(["" if record[name] is None else record[name] for name in COLUMNS.values()])
    return text.getvalue().encode()


def size_of_folder(folder: Path) -> int:
    """Bytes of all its files, those left out that go meanwhile."""
    num_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += os.stat(os.path.join(path, name)).st_size
    return num_bytes


def size_of_adapters(folder: Path) -> int:
    """Bytes that stay."""
    return sum(path.stat().st_size for path in folder.glob(f"{ADAPTER_FOLDER}*/*"))


def remove_all_but_adapters(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != ADAPTER_FOLDER and not path.name.startswith(CHECKPOINT_PREFIX):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
