"""Jobs, their events and checkpoints as OpenAI's objects."""

from __future__ import annotations

import sqlite3
from typing import Any

import orjson

from tessera.app.openai.fine_tuning.tables import checkpoints_of, events_of, progress
from tessera.app.store.objects import StoredObject
from tessera.app.training.job_messages import ADAPTER_FOLDER, checkpoint_folder

CHECKPOINT_MARK = ":ckpt-step-"


def job_object(database: sqlite3.Connection, stored: StoredObject) -> dict[str, Any]:
    body = orjson.loads(stored.body)
    status, _, _, finish = progress(database, stored.seq)
    chosen = body["hyperparameters"]
    return {
        "id": stored.id,
        "object": "fine_tuning.job",
        "model": body["model"],
        "created_at": stored.created,
        "finished_at": body.get("finished_at"),
        "fine_tuned_model": body.get("fine_tuned_model"),
        "organization_id": body["organization_id"],
        "result_files": body.get("result_files", []),
        "status": status,
        "training_file": body["training_file"],
        "validation_file": body["validation_file"],
        "hyperparameters": {name: value for name, value in chosen.items() if name != "beta"},
        "method": {"type": body["method"], body["method"]: {"hyperparameters": chosen}},
        "trained_tokens": body.get("trained_tokens"),
        "error": body.get("error"),
        "seed": body["seed"],
        "estimated_finish": int(finish) if finish is not None and status == "running" else None,
        "integrations": [],
        "metadata": body["metadata"],
    }


def event_objects(database: sqlite3.Connection, seq: int) -> list[dict[str, Any]]:
    """The oldest first."""
    _, _, num_steps, _ = progress(database, seq)
    return [
        {
            "id": event_id,
            "object": "fine_tuning.job.event",
            "created_at": created,
            "level": level,
            "message": message,
            "type": "message" if step is None else "metrics",
            "data": None
            if step is None
            else {"step": step, "total_steps": num_steps, "train_loss": loss, "valid_loss": validation_loss},
        }
        for event_id, created, level, message, step, loss, validation_loss in events_of(database, seq)
    ]


def checkpoint_objects(database: sqlite3.Connection, stored: StoredObject) -> list[dict[str, Any]]:
    """The oldest first."""
    return [
        {
            "id": checkpoint_id,
            "object": "fine_tuning.job.checkpoint",
            "created_at": created,
            "fine_tuned_model_checkpoint": checkpoint_name(stored.label, step),
            "fine_tuning_job_id": stored.id,
            "metrics": {"step": step, "train_loss": loss, "valid_loss": validation_loss},
            "step_number": step,
        }
        for checkpoint_id, created, step, loss, validation_loss in checkpoints_of(database, stored.seq)
    ]


def checkpoint_name(result_name: str, step: int) -> str:
    """Of the model of a checkpoint, by that of the job's result."""
    return f"{result_name}{CHECKPOINT_MARK}{step}"


def result_names(database: sqlite3.Connection, seq: int, label: str) -> dict[str, str]:
    """Folders below the job's, by the names of its result and its checkpoints."""
    steps = (step for _, _, step, *_ in checkpoints_of(database, seq))
    return {label: ADAPTER_FOLDER, **{checkpoint_name(label, step): checkpoint_folder(step) for step in steps}}
