"""The jobs of /v1/fine_tuning/jobs as routes see them: created, read, listed, cancelled, paused, resumed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from fastapi import Request

from tessera.app.http.errors import PermissionDeniedError
from tessera.app.keys.key_ring import KeyHolder
from tessera.app.openai.files.files import Files
from tessera.app.openai.fine_tuning.job_objects import checkpoint_objects, event_objects, job_object, result_names
from tessera.app.openai.fine_tuning.objects import JobStatus
from tessera.app.openai.fine_tuning.schema import MAX_SEED, FineTuningRequest
from tessera.app.openai.fine_tuning.tables import (
    ENDED,
    change_job,
    delete_oldest_without_result,
    end_job,
    insert_event,
    insert_job,
    num_active,
    num_results,
    progress,
)
from tessera.app.openai.pages import PageRequest, page_of
from tessera.app.settings import AppSettings
from tessera.app.store.contents import Contents
from tessera.app.store.errors import StoreQuotaError
from tessera.app.store.objects import ObjectTable, StoredObject, StoreLimits
from tessera.app.store.store import Store
from tessera.app.training.job_messages import TRAINING_FILE, VALIDATION_FILE
from tessera.engine.contract.config import PRIVATE_PREFIX
from tessera.engine.contract.errors import InvalidRequestError, NotFoundError, QueueFullError

MAX_JOBS = 1000  # of one API key
MAX_ACTIVE = 16  # of one API key that wait, run or are paused
MAX_RESULTS = 64  # of one API key: each takes up to four of the adapters that the engine can serve
FOLDER = "fine_tuning"  # of the data folder
PURPOSE = "fine-tune"
ORGANIZATION = "tessera"


class FineTuningJobs:
    """Every method may raise StoreUnavailableError or StoreFullError."""

    def __init__(self, store: Store, files: Files, settings: AppSettings) -> None:
        self.store = store
        self.files = files
        self.settings = settings
        self.table = ObjectTable(
            "fine_tuning_job",
            StoreLimits.of(settings),
            max_count=MAX_JOBS,
            max_bytes=int(settings.key_data_limit * 2**30),
            evicts=False,
        )

    @property
    def base_names(self) -> list[str]:
        """Of the models that can be fine-tuned."""
        return [name for model in self.settings.models for name in model.served_model_names]

    async def create(self, tenant: str, owner: str, request: FineTuningRequest) -> dict[str, Any]:
        """-> the job object. Raises NotFoundError, InvalidRequestError, QueueFullError.

        Args:
            owner: part of the name of the result.
        """
        if request.model not in self.base_names:
            raise InvalidRequestError(
                f"The model {request.model[:100]!r} is not available for fine-tuning; it must be one of "
                f"{', '.join(self.base_names)}.",
                param="model",
                code="model_not_available",
            )
        sources: list[tuple[str, StoredObject, str]] = []
        for name, file_id, param in (
            (TRAINING_FILE, request.training_file, "training_file"),
            (VALIDATION_FILE, request.validation_file, "validation_file"),
        ):
            if file_id is None:
                continue
            file = await self.files.find(tenant, file_id, param=param)
            if file.label != PURPOSE:
                raise InvalidRequestError(
                    f"The file has the purpose {file.label!r}; {param} must have the purpose {PURPOSE!r}.", param=param
                )
            sources.append((name, file, param))
        job_id = f"ftjob-{secrets.token_hex(12)}"
        body = {
            "model": request.model,
            "organization_id": ORGANIZATION,
            "training_file": request.training_file,
            "validation_file": request.validation_file,
            "method": request.method_type,
            "hyperparameters": request.chosen,
            "seed": request.seed if request.seed is not None else secrets.randbelow(MAX_SEED + 1),
            "metadata": request.metadata,
        }
        name = f"{PRIVATE_PREFIX}{request.model}:{owner}:{request.suffix or ''}:{job_id[-8:]}"
        folder = await self.store.with_folder(FOLDER, partial(_make_folder, name=job_id))
        try:
            for place, file, param in sources:
                await self.files.with_content(file, partial(_link, file.id, folder / place), param=param)
            num_bytes = sum(file.size for _, file, _ in sources)
            return await self.store.transact(
                lambda database: self._insert(database, tenant, job_id, name, body, num_bytes)
            )
        except Exception:  # not where it is cancelled: the transaction goes on
            await self.remove_folder(job_id)
            raise

    async def find(self, tenant: str, job_id: str) -> dict[str, Any]:
        """Raises NotFoundError."""
        return await self.store.query(lambda database: job_object(database, self._find(database, tenant, job_id)))

    async def page(
        self, tenant: str, asked: PageRequest, metadata: Mapping[str, str] | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """Job objects, and whether there are more. Raises InvalidRequestError.

        Args:
            metadata: only jobs with all of it; an empty one: only those without any.
        """

        def accepts(stored: StoredObject) -> bool:
            own = orjson.loads(stored.body)["metadata"] or {}
            assert metadata is not None
            return metadata.items() <= own.items() if metadata else not own

        def read(database: sqlite3.Connection) -> tuple[list[dict[str, Any]], bool] | None:
            page = self.table.page(
                database,
                tenant,
                limit=asked.limit,
                ascending=asked.ascending,
                after=asked.after,
                accepts=accepts if metadata is not None else None,
            )
            if page is None:
                return None
            return [job_object(database, stored) for stored in page.objects], page.has_more

        found = await self.store.query(read)
        if found is None:
            raise InvalidRequestError(f"after: there is no fine-tuning job {str(asked.after)[:100]!r}.", param="after")
        return found

    async def events(self, tenant: str, job_id: str, asked: PageRequest) -> dict[str, Any]:
        """A list object. Raises NotFoundError, InvalidRequestError."""
        events = await self.store.query(
            lambda database: event_objects(database, self._find(database, tenant, job_id).seq)
        )
        return page_of(events, asked, "job's events")

    async def checkpoints(self, tenant: str, job_id: str, asked: PageRequest) -> dict[str, Any]:
        """A list object. Raises NotFoundError, InvalidRequestError."""
        checkpoints = await self.store.query(
            lambda database: checkpoint_objects(database, self._find(database, tenant, job_id))
        )
        return page_of(checkpoints, asked, "job's checkpoints")

    async def cancel(self, tenant: str, job_id: str) -> dict[str, Any]:
        """-> the cancelled job. Raises NotFoundError, InvalidRequestError where it has ended."""
        changes = {"finished_at": int(time.time())}
        cancelled = await self._change(tenant, job_id, "cancelled", "The job has been cancelled.", changes)
        await self.remove_folder(job_id)  # a process that still writes there has nothing to lose
        return cancelled

    async def pause(self, tenant: str, job_id: str) -> dict[str, Any]:
        """-> the paused job. Raises NotFoundError, InvalidRequestError where it has ended or is paused."""
        return await self._change(tenant, job_id, "paused", "The job has been paused.")

    async def resume(self, tenant: str, job_id: str) -> dict[str, Any]:
        """-> the job, which waits again. Raises NotFoundError, InvalidRequestError where it is not paused."""
        return await self._change(tenant, job_id, "queued", "The job has been resumed.")

    async def delete_result(self, tenant: str, name: str) -> list[str] | None:
        """Delete the model that a job has made, and its checkpoints; -> their names, None where there is none."""

        def delete(database: sqlite3.Connection) -> tuple[str, list[str]] | None:
            page = self.table.page(database, tenant, limit=1, ascending=True, label=name)
            stored = page.objects[0] if page is not None and page.objects else None
            if stored is None or progress(database, stored.seq)[0] != "succeeded":
                return None
            names = list(result_names(database, stored.seq, name))
            end_job(database, self.table, stored.seq)
            return stored.id, names

        found = await self.store.transact(delete)
        if found is None:
            return None
        job_id, names = found
        await self.remove_folder(job_id)
        return names

    async def remove_folder(self, job_id: str) -> None:
        await self.store.with_folder(FOLDER, lambda folder: shutil.rmtree(folder / job_id, ignore_errors=True))

    async def _change(
        self, tenant: str, job_id: str, status: JobStatus, message: str, changes: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        def change(database: sqlite3.Connection) -> dict[str, Any]:
            stored = self._find(database, tenant, job_id)
            before, *_ = progress(database, stored.seq)
            if before in ENDED:
                raise InvalidRequestError(
                    f"The job {job_id} has ended already: its status is {before!r}.", code="job_has_ended"
                )
            if (status == "queued") != (before == "paused") and status != "cancelled":
                wanted = "is not paused" if status == "queued" else "is paused already"
                raise InvalidRequestError(f"The job {job_id} {wanted}.", code="job_not_in_state")
            change_job(database, stored.seq, status, changes)
            insert_event(database, stored.seq, message)
            if status == "cancelled":
                end_job(database, self.table, stored.seq)
            return job_object(database, self._find(database, tenant, job_id))

        return await self.store.transact(change)

    def _insert(
        self,
        database: sqlite3.Connection,
        tenant: str,
        job_id: str,
        result_name: str,
        body: dict[str, Any],
        num_bytes: int,
    ) -> dict[str, Any]:
        if num_active(database, tenant) >= MAX_ACTIVE:
            raise QueueFullError(
                f"At most {MAX_ACTIVE} fine-tuning jobs of an API key may wait, run or be paused.", retry_after=60
            )
        if num_results(database, tenant) >= MAX_RESULTS:
            raise StoreQuotaError(
                f"At most {MAX_RESULTS} fine-tuned models are kept for each API key; delete some first."
            )
        if self.table.usage(database, tenant)[0] >= MAX_JOBS:
            delete_oldest_without_result(database, tenant)
        seq = self.table.insert(
            database, tenant, job_id, orjson.dumps(body), label=result_name, extra_bytes=num_bytes, is_aging=False
        )
        insert_job(database, seq, tenant, body["model"])
        insert_event(database, seq, f"Created fine-tuning job: {job_id}")
        return job_object(database, self._find(database, tenant, job_id))

    def _find(self, database: sqlite3.Connection, tenant: str, job_id: str) -> StoredObject:
        stored = self.table.find(database, tenant, job_id)
        if stored is None:
            raise NotFoundError(
                f"Could not find fine tune: {job_id[:100]}", param="fine_tuning_job_id", code="fine_tune_not_found"
            )
        return stored


def _make_folder(folder: Path, name: str) -> Path:
    """Of a job."""
    (folder / name).mkdir(mode=0o700)
    return folder / name


def _link(file_id: str, place: Path, contents: Contents) -> None:
    """Make a file of the store a job's, which may lose it then."""
    try:
        os.link(contents.path(file_id), place)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(contents.path(file_id), place)


def jobs_of(request: Request) -> FineTuningJobs:
    """Raises PermissionDeniedError where the server has no fine-tuning."""
    jobs: Any = request.app.state.fine_tuning_jobs
    assert isinstance(jobs, FineTuningJobs)
    if not jobs.settings.enable_fine_tuning:
        raise PermissionDeniedError("Fine-tuning is off: the server's option --enable-fine-tuning turns it on.")
    return jobs


def result_owner(request: Request) -> str:
    """Part of the names of results: that of the key, where it has one."""
    holder = getattr(request.state, "holder", None)
    if not isinstance(holder, KeyHolder) or holder.key is None:
        return ORGANIZATION
    return re.sub(r"[^A-Za-z0-9_.-]", "-", holder.name)


def remove_unknown_folders(folder: Path, known: set[str], before: float) -> None:
    """Remove the folders of jobs that are not known, if they are older than a Unix time."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.name not in known and entry.stat().st_mtime < before:
                    shutil.rmtree(entry.path, ignore_errors=True)
