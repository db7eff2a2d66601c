"""One job, by the process that owns it: its child process is started, followed, and started again where it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

from tessera.app.model_settings import ModelSettings
from tessera.app.openai.files.files import new_file_id
from tessera.app.openai.fine_tuning.job_child import STOP_TIMEOUT, JobChild
from tessera.app.openai.fine_tuning.job_files import (
    metrics_csv,
    remove_all_but_adapters,
    size_of_adapters,
    size_of_folder,
)
from tessera.app.openai.fine_tuning.job_objects import result_names
from tessera.app.openai.fine_tuning.jobs import FOLDER, FineTuningJobs
from tessera.app.openai.fine_tuning.objects import JobStatus
from tessera.app.openai.fine_tuning.results import JobResult, JobResults
from tessera.app.openai.fine_tuning.tables import (
    JobRow,
    OwnerLostError,
    StepLoss,
    begin_steps,
    bytes_of_others,
    change_job,
    claim,
    end_job,
    end_turn,
    insert_event,
    keep_result,
    others_wait,
    read_owned,
    save_checkpoint,
    save_size,
    save_steps,
)
from tessera.app.store.contents import Contents
from tessera.app.training.job_messages import NUM_CHECKPOINTS, Began, Failed, JobLaunch, StepTaken, Succeeded
from tessera.engine.contract.machine import num_cores

logger = logging.getLogger("tessera.app")

LOOK_INTERVAL = (
    0.5  # seconds between two looks whether the job was cancelled or paused, and two transactions with steps
)
MAX_DEATHS = 3  # of the process without a step in between
RETRY_DELAY = 1.0  # seconds
TURN = 600.0  # seconds, and at least a step, after which a job lets those of other keys have their turn
MAX_READING = 7200.0  # seconds that files are read for where jobs of other keys wait: it cannot be interrupted
READS_TOO_LONG = "The files were still being read after two hours, and jobs of other keys wait: use smaller files."
MEASURE_INTERVAL = 10.0  # seconds between two looks how large the job's folder is
MAX_METRICS_EVENTS = 500  # of one job, evenly over its steps
RUNNING: tuple[JobStatus, ...] = ("validating_files", "running")


class JobRun:
    """Works on the job `seq`, whose lock this process has.

    Attributes:
        child: the process, for the time being.
    """

    def __init__(self, jobs: FineTuningJobs, results: JobResults, seq: int, owner: str) -> None:
        self.child: JobChild | None = None
        self._jobs = jobs
        self._results = results
        self._store = jobs.store
        self._seq = seq
        self._owner = owner
        self._steps: list[StepTaken] = []
        self._outcome: Succeeded | Failed | None = None
        self._num_steps = 0
        self._began = time.monotonic()
        self._has_stepped = False
        self._measured_at = -math.inf
        self._look = asyncio.Event()

    def look_now(self) -> None:
        """The job may have been cancelled or paused."""
        self._look.set()

    async def run(self) -> None:
        """Raises OwnerLostError, and StoreUnavailableError or StoreFullError where it must be tried again."""
        claimed = await self._store.transact(partial(claim, seq=self._seq, owner=self._owner))
        if claimed is None:
            return
        row = claimed
        folder = await self._store.with_folder(FOLDER, lambda folder: folder / claimed.id)
        num_deaths, step = 0, row.step
        if step == 0 and not await self._has_room(row):
            await self._fail(row, Failed("storage_limit_reached", self._no_room, None))
            return
        while True:
            exit_code = await self._run_child(row, folder)
            await self._measure(folder)
            row = await self._store.query(partial(read_owned, seq=self._seq, owner=self._owner))
            if row.status == "cancelled":  # the process may have written since
                await self._jobs.remove_folder(row.id)
            if row.status not in RUNNING:
                return
            if isinstance(self._outcome, Succeeded):
                await self._succeed(row, folder, self._outcome)
                return
            if isinstance(self._outcome, Failed):
                await self._fail(row, self._outcome)
                return
            num_deaths, step = (0 if row.step > step else num_deaths + 1), row.step
            if num_deaths == MAX_DEATHS:
                message = f"The process of the job ended {MAX_DEATHS} times in a row, last with exit code {exit_code}."
                await self._fail(row, Failed("server_error", message, None))
                return
            message = f"The process of the job ended with exit code {exit_code}; it goes on from the last checkpoint."
            await self._store.transact(partial(insert_event, seq=self._seq, message=message, level="warn"))
            await asyncio.sleep(RETRY_DELAY)

    async def _run_child(self, row: JobRow, folder: Path) -> int:
        """-> its exit code."""
        launch, num_threads = await self._launch(row, folder)
        child = self.child = JobChild(launch, num_threads)
        following: asyncio.Future[None] | None = None
        try:
            await child.start()
            following = asyncio.ensure_future(self._follow(child))
            while not following.done():
                look = asyncio.ensure_future(self._look.wait())
                await asyncio.wait({following, look}, timeout=LOOK_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
                look.cancel()
                self._look.clear()
                status = await self._save_steps()
                if time.monotonic() - self._measured_at > MEASURE_INTERVAL:
                    await self._measure(folder)
                is_over = await self._is_turn_over(status)
                if is_over and not self._has_stepped:
                    self._outcome = Failed("invalid_training_file", READS_TOO_LONG, "training_file")
                    return await child.kill()
                if status == "paused" or is_over:
                    child.stop()
                    await asyncio.wait({following}, timeout=STOP_TIMEOUT)
                if is_over and self._outcome is None:
                    await self._store.transact(self._end_turn)
                    return await child.kill()
                if status not in RUNNING:
                    return await child.kill()
            await self._save_steps()
            following.result()
            return await child.kill()
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            await asyncio.shield(child.kill())
            self.child = None

    async def _has_room(self, row: JobRow) -> bool:
        """Whether the key's other jobs and results are within its limit, which the folders of those count towards."""
        others = await self._store.query(lambda database: bytes_of_others(database, self._jobs.table, row))
        return others <= self._jobs.table.max_bytes

    @property
    def _no_room(self) -> str:
        limit = self._jobs.table.max_bytes
        return f"The API key's other jobs and their results have more than {limit} bytes; delete or cancel some first."

    async def _measure(self, folder: Path) -> None:
        num_bytes = await self._store.with_folder(FOLDER, lambda _: size_of_folder(folder))
        await self._store.transact(partial(save_size, seq=self._seq, owner=self._owner, num_bytes=num_bytes))
        self._measured_at = time.monotonic()

    async def _is_turn_over(self, status: JobStatus) -> bool:
        """Whether this job has had its time, and another key's waits."""
        if status not in RUNNING or not (self._has_stepped or status == "validating_files"):
            return False
        if time.monotonic() - self._began < (TURN if self._has_stepped else MAX_READING):
            return False
        return await self._store.query(partial(others_wait, seq=self._seq, names=self._jobs.base_names))

    def _end_turn(self, database: sqlite3.Connection) -> None:
        if read_owned(database, self._seq, self._owner).status in RUNNING:
            end_turn(database, self._seq)

    async def _launch(self, row: JobRow, folder: Path) -> tuple[JobLaunch, int]:
        body, share = row.body, self._jobs.settings.fine_tuning_share
        model = _model_called(body["model"], self._jobs)
        # Kept, as the order of sums depends on it.
        num_threads = body.get("num_threads") or max(1, int(share * num_cores()))

        def begin(database: sqlite3.Connection) -> None:
            owned = read_owned(database, self._seq, self._owner)
            if owned.status in RUNNING:
                change_job(database, self._seq, "validating_files", {"num_threads": num_threads})
                if owned.step == 0:
                    insert_event(database, self._seq, "Validating training file")

        await self._store.transact(begin)
        chosen = {name: None if value == "auto" else value for name, value in body["hyperparameters"].items()}
        launch = JobLaunch(
            folder=str(folder),
            model=model.model_folder,
            name=body["model"],
            chat_template=model.chat_template,
            method=body["method"],
            seed=body["seed"],
            known_step=row.step,
            share=share,
            num_cpus=num_cores(),
            device=model.device,
            num_epochs=chosen["n_epochs"],
            batch_size=chosen["batch_size"],
            rate_multiplier=chosen["learning_rate_multiplier"],
            beta=chosen.get("beta"),
        )
        return launch, num_threads

    async def _follow(self, child: JobChild) -> None:
        async for message in child.messages():
            if isinstance(message, Began):
                await self._begin(message)
            elif isinstance(message, StepTaken):
                self._steps.append(message)
                self._has_stepped = True
            elif isinstance(message, (Succeeded, Failed)):
                self._outcome = message

    async def _begin(self, began: Began) -> None:
        """The hyperparameters are those that were chosen, from now on."""
        self._num_steps = began.num_steps
        numbers = {
            "n_epochs": began.num_epochs,
            "batch_size": began.batch_size,
            "learning_rate_multiplier": began.rate_multiplier,
            "beta": began.beta,
        }

        def begin(database: sqlite3.Connection) -> None:
            row = read_owned(database, self._seq, self._owner)
            if row.status not in RUNNING:
                return
            chosen = {name: numbers[name] for name in row.body["hyperparameters"]}
            change_job(database, self._seq, "running", {"hyperparameters": chosen})
            begin_steps(database, self._seq, min(row.step, began.step), began.num_steps)
            for note in began.notes:
                insert_event(database, self._seq, note, level="warn")
            message = (
                f"Training goes on after step {began.step} of {began.num_steps}"
                if began.step
                else f"Training starts: {began.num_examples} examples, {began.num_epoch_tokens} tokens an epoch, "
                f"{began.num_steps} steps, on {began.device}"
            )
            insert_event(database, self._seq, message)

        await self._store.transact(begin)

    async def _save_steps(self) -> JobStatus:
        """Store the steps so far; -> the job's status. Raises OwnerLostError."""
        taken, self._steps = self._steps, []

        def save(database: sqlite3.Connection) -> JobStatus:
            row = read_owned(database, self._seq, self._owner)
            if not taken or row.status not in (*RUNNING, "paused"):
                return row.status
            new = [each for each in taken if each.step > row.step]
            for each in taken:
                loss = StepLoss(each.step, each.loss, each.validation_loss)
                if each.checkpoint:
                    save_checkpoint(database, self._seq, loss, NUM_CHECKPOINTS)
                if each in new and self._is_told(each):
                    insert_event(database, self._seq, _described(each, row.num_steps), taken=loss)
            if new:
                finish = time.time() + (row.num_steps - new[-1].step) * new[-1].seconds
                tokens = sum(each.num_tokens for each in new)
                save_steps(database, self._seq, len(new), tokens, new[-1].step, finish)
            return row.status

        return await self._store.transact(save)

    def _is_told(self, taken: StepTaken) -> bool:
        every = -(-self._num_steps // MAX_METRICS_EVENTS)
        return taken.step % every == 0 or taken.step == self._num_steps or taken.validation_loss is not None

    async def _succeed(self, row: JobRow, folder: Path, outcome: Succeeded) -> None:
        """Store the metrics and the result, once."""
        data = await self._store.with_folder(FOLDER, lambda _: metrics_csv(folder))
        num_bytes = await self._store.with_folder(FOLDER, lambda _: size_of_adapters(folder))
        file_id = new_file_id()
        await self._store.with_contents(partial(_publish, data, file_id))

        def succeed(database: sqlite3.Connection) -> None:
            if read_owned(database, self._seq, self._owner).status not in RUNNING:
                raise OwnerLostError
            self._jobs.files.insert(
                database,
                row.tenant,
                file_id,
                f"{row.id}_metrics.csv",
                "fine-tune-results",
                len(data),
                is_bounded=False,
            )
            changes: dict[str, Any] = {
                "finished_at": int(time.time()),
                "fine_tuned_model": row.result_name,
                "trained_tokens": outcome.num_trained_tokens,
                "result_files": [file_id],
            }
            change_job(database, self._seq, "succeeded", changes)
            keep_result(database, self._seq, num_bytes)
            insert_event(database, self._seq, f"New fine-tuned model created: {row.result_name}")
            insert_event(database, self._seq, "The job has successfully completed")

        # Served first: a client that sees the status calls the model at once.
        names = await self._store.query(partial(result_names, seq=self._seq, label=row.result_name))
        await self._results.serve(JobResult(row.id, row.tenant, row.body["model"], names))
        try:
            await self._store.transact(succeed)
        except BaseException:
            with contextlib.suppress(Exception):
                await self._results.forget(list(names))
                await self._store.with_contents(lambda contents: contents.remove(file_id))
            raise
        await self._store.with_folder(FOLDER, lambda _: remove_all_but_adapters(folder))
        logger.info("fine-tuning job %s: succeeded", row.id)

    async def _fail(self, row: JobRow, failed: Failed) -> None:
        error = {"code": failed.code, "message": failed.message, "param": failed.param}
        changes = {"finished_at": int(time.time()), "error": error}

        def fail(database: sqlite3.Connection) -> None:
            read_owned(database, self._seq, self._owner)
            change_job(database, self._seq, "failed", changes)
            insert_event(database, self._seq, f"The job failed: {failed.message}", level="error")
            end_job(database, self._jobs.table, self._seq)

        await self._store.transact(fail)
        await self._jobs.remove_folder(row.id)
        logger.info("fine-tuning job %s: failed: %s", row.id, failed.message)


def _model_called(name: str, jobs: FineTuningJobs) -> ModelSettings:
    return next(model for model in jobs.settings.models if name in model.served_model_names)


def _described(taken: StepTaken, num_steps: int) -> str:
    held_out = "" if taken.validation_loss is None else f", validation loss={taken.validation_loss:.4f}"
    return f"Step {taken.step}/{num_steps}: training loss={taken.loss:.4f}{held_out}"


def _publish(data: bytes, file_id: str, contents: Contents) -> None:
    incoming = contents.begin()
    try:
        incoming.write(data)
        incoming.publish(file_id)
    finally:
        incoming.discard()
