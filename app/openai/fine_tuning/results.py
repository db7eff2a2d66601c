"""The results of jobs, served beside their base models: each for its own API key."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request

from tessera.app.generate.served_models import ServedModels
from tessera.app.openai.fine_tuning.job_objects import CHECKPOINT_MARK, result_names
from tessera.app.openai.fine_tuning.jobs import FOLDER, FineTuningJobs
from tessera.app.store.errors import StoreFullError, StoreUnavailableError
from tessera.engine.contract.errors import RequestError

logger = logging.getLogger("tessera.app")

LOOK_INTERVAL = 1.0  # seconds
RETRY_DELAY = 60.0  # for an adapter that the engine has refused

RESULTS = """
    SELECT seq, id, objects.tenant, base, label FROM fine_tuning_jobs JOIN objects USING (seq)
    WHERE status = 'succeeded' AND has_result"""


@dataclass(frozen=True, slots=True)
class JobResult:
    """The adapters that a job has trained: one under its name, and one for each checkpoint.

    Attributes:
        base: the name of the model that it is for.
        folders: below the job's, by the names of models.
    """

    job_id: str
    tenant: str
    base: str
    folders: dict[str, str]


class JobResults:
    """Knows the owners of results, and has the engines serve them; also after a restart, of an engine or the server."""

    def __init__(self, jobs: FineTuningJobs, models: ServedModels) -> None:
        self._jobs = jobs
        self._store = jobs.store
        self._models = models
        self._owners: dict[str, str] = {}
        self._refused_at: dict[str, float] = {}
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Have results served from now on, from the running event loop; one app process of a server does."""
        if self._jobs.settings.enable_fine_tuning:
            self._looking = asyncio.get_running_loop().create_task(self._look_for_ever())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def is_visible(self, name: str, tenant: str) -> bool:
        """Whether a model is one that this API key may know of."""
        return self._owners.get(name, tenant) == tenant

    async def owner_of(self, name: str) -> str | None:
        """The tenant whose result is called so; None where there is none. Raises StoreUnavailableError."""
        if name not in self._owners:
            label = name.partition(CHECKPOINT_MARK)[0]
            found = await self._store.query(partial(_owner_of, label=label))
            if found is None:
                return None
            self._owners[name] = found
        return self._owners[name]

    async def serve(self, result: JobResult) -> None:
        """Have its models served, if the engine is there and does not serve them yet. Raises StoreUnavailableError."""
        model = self._models.find(result.base)
        if model is None or not model.client.health()[0]:
            return
        for name, folder in result.folders.items():
            self._owners[name] = result.tenant
            refused_at = self._refused_at.get(name, float("-inf"))
            if name in (model.client.adapters or {}) or time.monotonic() - refused_at < RETRY_DELAY:
                continue
            path = await self._store.with_folder(FOLDER, partial(_path_of, job_id=result.job_id, name=folder))
            try:
                await model.client.load_adapter(name, str(path), by_server=True)
            except RequestError as error:
                if name not in (model.client.adapters or {}):  # another app process was faster
                    self._refused_at[name] = time.monotonic()
                    logger.warning("the fine-tuned model %s is not served: %s", name, error)

    async def forget(self, names: list[str]) -> None:
        """They are deleted: engines serve them no more."""
        for name in names:
            self._owners.pop(name, None)
            for model in self._models:
                if name in (model.client.adapters or {}):
                    try:
                        await model.client.unload_adapter(name, by_server=True)
                    except RequestError as error:
                        logger.warning("the deleted model %s is still loaded: %s", name, error)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                results = await self._store.query(_results)
                self._owners = {name: result.tenant for result in results for name in result.folders}
                if self._jobs.settings.app_process == 0:
                    for result in results:
                        await self.serve(result)
            except (StoreUnavailableError, StoreFullError):
                pass  # which the runner of jobs logs
            except Exception:
                logger.exception("results of fine-tuning jobs could not be served")
            await asyncio.sleep(LOOK_INTERVAL)


def _results(database: sqlite3.Connection) -> list[JobResult]:
    return [
        JobResult(job_id, tenant, base, result_names(database, seq, label))
        for seq, job_id, tenant, base, label in database.execute(RESULTS).fetchall()
    ]


def _owner_of(database: sqlite3.Connection, label: str) -> str | None:
    row = database.execute(f"{RESULTS} AND label = ?", (label,)).fetchone()
    return None if row is None else str(row[2])


def _path_of(folder: Path, job_id: str, name: str) -> Path:
    return folder / job_id / name


def results_of(request: Request) -> JobResults:
    results: Any = request.app.state.fine_tuning_results
    assert isinstance(results, JobResults)
    return results
