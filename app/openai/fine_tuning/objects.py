"""Response models of /v1/fine_tuning/jobs."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from tessera.app.http.description import ApiObject

Auto: TypeAlias = Literal["auto"]
JobStatus: TypeAlias = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]


class JobHyperparameters(ApiObject):
    """Numbers once the files have been read."""

    batch_size: int | Auto
    learning_rate_multiplier: float | Auto
    n_epochs: int | Auto


class JobDpoHyperparameters(JobHyperparameters):
    beta: float | Auto


class JobSupervised(ApiObject):
    hyperparameters: JobHyperparameters


class JobDpo(ApiObject):
    hyperparameters: JobDpoHyperparameters


class SupervisedJobMethod(ApiObject):
    type: Literal["supervised"]
    supervised: JobSupervised


class DpoJobMethod(ApiObject):
    type: Literal["dpo"]
    dpo: JobDpo


class JobError(ApiObject):
    """Why a job has failed."""

    code: str
    message: str
    param: str | None


class FineTuningJobObject(ApiObject):
    """A job and how far it is."""

    id: str
    object: Literal["fine_tuning.job"]
    model: str
    created_at: int
    finished_at: int | None
    fine_tuned_model: str | None
    organization_id: str
    result_files: list[str]
    status: JobStatus
    training_file: str
    validation_file: str | None
    hyperparameters: JobHyperparameters
    method: SupervisedJobMethod | DpoJobMethod
    trained_tokens: int | None
    error: JobError | None
    seed: int
    estimated_finish: int | None
    integrations: list[Any]
    metadata: dict[str, str] | None


class FineTuningJobList(ApiObject):
    """Jobs, the newest first."""

    object: Literal["list"]
    data: list[FineTuningJobObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StepMetrics(ApiObject):
    """Of one step."""

    step: int
    total_steps: int
    train_loss: float
    valid_loss: float | None


class JobEventObject(ApiObject):
    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: StepMetrics | None


class JobEventList(ApiObject):
    """Events, the newest first."""

    object: Literal["list"]
    data: list[JobEventObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CheckpointMetrics(ApiObject):
    step: int
    train_loss: float
    valid_loss: float | None


class JobCheckpointObject(ApiObject):
    """The adapter as it was at the end of an epoch."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: CheckpointMetrics
    step_number: int


class JobCheckpointList(ApiObject):
    """Checkpoints, the newest first."""

    object: Literal["list"]
    data: list[JobCheckpointObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
