"""/v1/fine_tuning/jobs with OpenAI's client: jobs that a real process trains on a tiny model, and what ends them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import httpx
import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from tessera.app.openai.fine_tuning import job_child, job_run, jobs
from tessera.app.openai.fine_tuning.objects import (
    FineTuningJobList,
    FineTuningJobObject,
    JobCheckpointList,
    JobEventList,
)
from tessera.app.training.job_messages import Failed, FromJob, JobLaunch
from tessera.app.training.job_process import JobProcess
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.tensor import Device
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.processes.job_processes import job_processes
from tests.support.servers.http_fixtures import call, ids, serve, settings_for
from tests.support.servers.server_fixture import write_tiny_model

T = TypeVar("T")

KEYS = ("first", "second")
PATIENCE = 60.0
ENDED = ("succeeded", "failed", "cancelled")
USER: dict[str, Any] = {"role": "user", "content": "Say it."}
NUM_STEPS = 60
HELLO = play(ids("hello"), finish="length")


def chat(reply: str = "the train is there") -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": reply}]}


def pair(better: str, worse: str) -> dict[str, Any]:
    outputs = [[{"role": "assistant", "content": text}] for text in (better, worse)]
    return {"input": {"messages": [USER]}, "preferred_output": outputs[0], "non_preferred_output": outputs[1]}


LINES = [chat(f"the {word}") for word in ("train", "one", "other", "road", "sea")]
METHOD: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 12, "batch_size": 1}}}


@contextmanager
def tuning_server(
    model: Path, data: Path, engine: FakeClient | None = None, *, share: float = 1.0, **changes: Any
) -> Iterator[str]:
    """On one CPU, whatever the machine has."""
    settings = {
        "api_keys": KEYS,
        "data_dir": str(data),
        "enable_fine_tuning": True,
        "fine_tuning_share": share,
    } | changes
    with (
        patch("tessera.app.openai.fine_tuning.job_run.num_cores", lambda: 1),
        serve(engine or FakeClient(always(HELLO)), settings_for(model, **settings)) as url,
    ):
        yield url


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def engine() -> FakeClient:
    return FakeClient(always(HELLO))


@pytest.fixture(scope="module")
def url(model: Path, data: Path, engine: FakeClient) -> Iterator[str]:
    with tuning_server(model, data, engine) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[openai.OpenAI]:
    with sdk(url) as client:
        yield client


def sdk(url: str, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def upload(api: openai.OpenAI, *lines: Any, purpose: Any = "fine-tune") -> str:
    content = b"".join((each if type(each) is bytes else json.dumps(each).encode()) + b"\n" for each in lines)
    return api.files.create(file=("chats.jsonl", content), purpose=purpose).id


def start(api: openai.OpenAI, *lines: Any, **options: Any) -> FineTuningJob:
    file_id = upload(api, *(lines or [chat()] * 4))
    return api.fine_tuning.jobs.create(**{"model": "tiny", "training_file": file_id, "seed": 3, **options})


def until(api: openai.OpenAI, job: FineTuningJob) -> FineTuningJob:
    """The job, which has ended."""
    waited(lambda: api.fine_tuning.jobs.retrieve(job.id).status in ENDED)
    return api.fine_tuning.jobs.retrieve(job.id)


def waited(condition: Callable[[], T]) -> T:
    """What it is once it is true."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, found
        threading.Event().wait(0.1)
    return found


def step_of(api: openai.OpenAI, job: FineTuningJob) -> int:
    """The last that its events tell of."""
    found = (event.data for event in api.fine_tuning.jobs.list_events(job.id, limit=3).data)
    return max((each["step"] for each in found if isinstance(each, dict)), default=0)


def losses(api: openai.OpenAI, job: FineTuningJob) -> list[tuple[int, float]]:
    """Of the metrics events, the oldest first."""
    events = list(api.fine_tuning.jobs.list_events(job.id, limit=100))
    found = [event.data for event in reversed(events) if event.type == "metrics"]
    return [(each["step"], each["train_loss"]) for each in found if isinstance(each, dict)]


def messages(api: openai.OpenAI, job: FineTuningJob) -> list[str]:
    """The newest first."""
    return [event.message for event in api.fine_tuning.jobs.list_events(job.id, limit=100)]


@pytest.fixture(scope="module")
def succeeded(api: openai.OpenAI) -> FineTuningJob:
    held_out = upload(api, chat("the train"))
    metadata = {"for": "tests"}
    job = start(api, *LINES, method=METHOD, validation_file=held_out, suffix="spelling", metadata=metadata)
    assert (job.status, job.object, job.seed, job.error) == ("queued", "fine_tuning.job", 3, None)
    job = until(api, job)
    assert job.status == "succeeded", job.error
    return job


def test_a_job_that_has_succeeded(api: openai.OpenAI, data: Path, succeeded: FineTuningJob) -> None:
    job = succeeded
    assert job.fine_tuned_model == f"ft:tiny:tessera:spelling:{job.id[-8:]}"
    assert job.hyperparameters.model_dump() == {"batch_size": 1, "learning_rate_multiplier": 1.0, "n_epochs": 12}
    assert job.method is not None
    assert job.method.type == "supervised"
    assert job.trained_tokens is not None
    assert job.trained_tokens > NUM_STEPS * 10
    assert job.finished_at is not None

    (result,) = job.result_files
    assert api.files.retrieve(result).purpose == "fine-tune-results"
    header, *rows = api.files.content(result).text.splitlines()
    assert header == "step,train_loss,valid_loss,learning_rate,gradient_norm,tokens,seconds"
    assert losses(api, job) == [(int(row.split(",")[0]), float(row.split(",")[1])) for row in rows]
    assert [row.split(",")[0] for row in rows] == list(map(str, range(1, NUM_STEPS + 1)))
    assert float(rows[-1].split(",")[1]) < 0.5 * float(rows[0].split(",")[1])

    checkpoints = api.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [each.step_number for each in checkpoints] == [60, 55, 50]
    assert checkpoints[0].fine_tuned_model_checkpoint == f"{job.fine_tuned_model}:ckpt-step-60"
    assert checkpoints[0].metrics.train_loss == float(rows[-1].split(",")[1])
    assert checkpoints[0].metrics.valid_loss == float(rows[-1].split(",")[2])

    folder = data / "fine_tuning" / job.id
    kept = ["adapter", "adapter-50", "adapter-55", "adapter-60"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert (folder / "adapter" / "adapter_config.json").is_file()
    last, other = (folder / name / "adapter_model.safetensors" for name in ("adapter", "adapter-60"))
    assert last.read_bytes() == other.read_bytes()

    told = messages(api, job)
    created = f"New fine-tuned model created: {job.fine_tuned_model}"
    assert told[:2] == ["The job has successfully completed", created]
    assert told[-1] == f"Created fine-tuning job: {job.id}"
    assert any(message.startswith("Step 60/60: training loss=") for message in told)


def test_responses_fit_their_models(url: str, succeeded: FineTuningJob) -> None:
    path = f"/v1/fine_tuning/jobs/{succeeded.id}"
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEYS[0]}"}) as http:
        FineTuningJobList.model_validate_json(http.get("/v1/fine_tuning/jobs").content)
        FineTuningJobObject.model_validate_json(http.get(path).content)
        events = JobEventList.model_validate_json(http.get(f"{path}/events", params={"limit": 100}).content)
        assert {event.type for event in events.data} == {"message", "metrics"}
        page = http.get(f"{path}/checkpoints", params={"limit": 1}).content
        checkpoints = JobCheckpointList.model_validate_json(page)
        assert (len(checkpoints.data), checkpoints.has_more) == (1, True)


def test_the_page_and_the_metrics_have_the_job(url: str, succeeded: FineTuningJob) -> None:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEYS[0]}"}) as http:
        job = http.get("/status.json").json()["fine_tuning"][-1]
        assert (job["id"], job["model"], job["status"]) == (succeeded.id, "tiny", "succeeded")
        assert (job["step"], job["num_steps"]) == (NUM_STEPS, NUM_STEPS)
        steps = [step for step, _ in job["losses"]]
        assert len(steps) <= 100
        assert steps == sorted(steps)
        assert steps[-1] == NUM_STEPS
        assert job["losses"][-1][1] < 0.5 * job["losses"][0][1]
        assert job["validation_loss"] is not None
        other = http.get("/status.json", headers={"authorization": f"Bearer {KEYS[1]}"})
        assert other.json()["fine_tuning"] == []
        # The runner reads them once a second.
        waited(lambda: 'tessera:fine_tuning_jobs{status="succeeded"} 1.0' in http.get("/metrics").text)
        text = http.get("/metrics").text
        assert f"tessera:fine_tuning_steps_total {NUM_STEPS}.0" in text
        assert f"tessera:fine_tuning_tokens_total {succeeded.trained_tokens}.0" in text


@pytest.mark.slow
def test_a_job_whose_process_and_server_end_comes_to_the_same_weights(
    model: Path, api: openai.OpenAI, data: Path, succeeded: FineTuningJob, tmp_path: Path
) -> None:
    with tuning_server(model, tmp_path, share=0.2) as url, sdk(url) as other:  # slow enough to be killed halfway
        job = start(other, *LINES, method=METHOD, validation_file=upload(other, chat("the train")))
        waited(lambda: step_of(other, job) >= 10)
        (pid,) = job_processes(tmp_path / "fine_tuning")
        os.kill(pid, signal.SIGKILL)
        waited(lambda: any("exit code -9" in message for message in messages(other, job)))
        waited(lambda: step_of(other, job) >= 12)
    assert not job_processes(tmp_path / "fine_tuning")
    with tuning_server(model, tmp_path) as url, sdk(url) as other:
        job = until(other, job)
        assert job.status == "succeeded", job.error
        assert losses(other, job) == losses(api, succeeded)
    engine = FakeClient(always(HELLO))
    with tuning_server(model, tmp_path, engine), sdk(url) as other:  # which serves the result again
        waited(lambda: job.fine_tuned_model in (engine.adapters or {}))
    weights = [
        (folder / "fine_tuning" / each.id / "adapter" / "adapter_model.safetensors").read_bytes()
        for folder, each in ((data, succeeded), (tmp_path, job))
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_job_is_paused_resumed_and_cancelled(api: openai.OpenAI, data: Path, succeeded: FineTuningJob) -> None:
    jobs = api.fine_tuning.jobs
    chosen = {"n_epochs": 50, "batch_size": 1, "beta": 0.5}
    pairs = [pair("yes", "no"), pair("on", "off")] * 5
    job = start(api, *pairs, method={"type": "dpo", "dpo": {"hyperparameters": chosen}})
    assert job.method is not None
    assert job.method.dpo is not None
    assert job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.5
    waited(lambda: step_of(api, job) >= 3)
    assert losses(api, job)[0][1] == pytest.approx(0.693, abs=1e-3)
    paused = FineTuningJobObject.model_validate_json(jobs.with_raw_response.pause(job.id).content)
    assert (paused.status, paused.method.type) == ("paused", "dpo")
    with pytest.raises(openai.BadRequestError, match="is paused already"):
        jobs.pause(job.id)
    waited(lambda: not job_processes(data / "fine_tuning"))
    assert list((data / "fine_tuning" / job.id / "checkpoints").iterdir())
    assert jobs.resume(job.id).status == "queued"
    with pytest.raises(openai.BadRequestError, match="is not paused"):
        jobs.resume(job.id)
    assert jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has ended already: its status is 'cancelled'"):
        jobs.cancel(job.id)
    waited(lambda: not job_processes(data / "fine_tuning") and not (data / "fine_tuning" / job.id).exists())
    assert jobs.retrieve(job.id).finished_at is not None


def test_a_wrong_file_fails_the_job_with_its_lines(api: openai.OpenAI, data: Path) -> None:
    job = until(api, start(api, chat(), {"messages": [USER]}, b"{"))
    FineTuningJobObject.model_validate_json(api.fine_tuning.jobs.with_raw_response.retrieve(job.id).content)
    assert job.status == "failed"
    assert job.error is not None
    assert (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
    assert job.error.message.splitlines()[0] == "training_file has 2 lines at fault:"
    assert "line 2: The last message must be the assistant's" in job.error.message
    assert "line 3: It is not JSON" in job.error.message
    assert not (data / "fine_tuning" / job.id).exists()


@pytest.mark.parametrize("said", ['"no message"', '"x" * 2**22'], ids=["no-message", "too-long"])
def test_fault_liveness_a_process_that_writes_no_message_has_died(
    said: str, api: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so it is not started again for ever."""
    (tmp_path / "talker.py").write_text(f"print({said}, flush=True)\ninput()\ninput()\n")
    for name, value in (("PACKAGE_ROOT", tmp_path), ("MODULE", "talker")):
        monkeypatch.setattr(job_child, name, value)
    monkeypatch.setattr(job_run, "RETRY_DELAY", 0.0)
    job = until(api, start(api))
    assert job.error is not None
    assert (job.status, job.error.code) == ("failed", "server_error")
    assert job.error.message.startswith("The process of the job ended 3 times in a row")


def test_fault_fairness_a_key_has_so_many_results(
    api: openai.OpenAI, succeeded: FineTuningJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than that would leave none of the engine's adapters to others."""
    monkeypatch.setattr(jobs, "MAX_RESULTS", 1)
    with pytest.raises(openai.BadRequestError, match="At most 1 fine-tuned models are kept") as refused:
        start(api)
    assert refused.value.code == "storage_limit_reached"


def test_fault_full_disk_the_folders_of_jobs_count_towards_the_limit_of_their_key(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the tokens, checkpoints and states of jobs that are paused would be beyond otherwise, sixteen times."""
    monkeypatch.setattr(job_run, "MEASURE_INTERVAL", 0.0)
    limit = 100_000
    with tuning_server(model, tmp_path, key_data_limit=limit / 2**30) as url, sdk(url) as api:
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 50, "batch_size": 1}}}
        first, second = start(api, *LINES, method=method), start(api)
        waited(lambda: step_of(api, first) >= 3)
        api.fine_tuning.jobs.pause(first.id)
        failed = until(api, second)
        assert failed.error is not None
        assert (failed.status, failed.error.code) == ("failed", "storage_limit_reached")
        assert f"have more than {limit} bytes" in failed.error.message
        with pytest.raises(openai.BadRequestError, match="bytes of fine_tuning_jobs are stored for each API key"):
            start(api)
        api.fine_tuning.jobs.cancel(first.id)
        assert until(api, start(api)).status == "succeeded"


def test_a_result_is_served_to_its_key_alone_until_it_is_deleted(
    url: str, api: openai.OpenAI, data: Path, engine: FakeClient, succeeded: FineTuningJob
) -> None:
    name = str(succeeded.fine_tuned_model)
    checkpoints = [each.fine_tuned_model_checkpoint for each in api.fine_tuning.jobs.checkpoints.list(succeeded.id)]
    assert engine.adapters is not None
    folder = data / "fine_tuning" / succeeded.id
    assert {each: engine.adapters[each].folder for each in (name, checkpoints[0])} == {
        name: str(folder / "adapter"),
        checkpoints[0]: str(folder / "adapter-60"),
    }
    ask: dict[str, Any] = {"messages": [USER], "max_tokens": 5}
    assert api.chat.completions.create(model=name, **ask).model == name
    assert engine.submissions[-1].adapter == name
    assert {name, *checkpoints} < {model.id for model in api.models.list()}
    assert api.models.retrieve(name).id == name
    with sdk(url, KEYS[1]) as other:
        assert {model.id for model in other.models.list()} == {"tiny"}
        for refused in (
            lambda: other.chat.completions.create(model=name, **ask),
            lambda: other.chat.completions.create(model=checkpoints[0], **ask),
            lambda: other.models.retrieve(name),
            lambda: other.models.delete(name),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()
    with pytest.raises(openai.NotFoundError, match="There is no fine-tuned model 'tiny' to delete"):
        api.models.delete("tiny")
    assert api.models.delete(name).deleted
    assert {model.id for model in api.models.list()} == {"tiny"}
    assert not engine.adapters
    assert not folder.exists()
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model=name, **ask)


def test_jobs_are_listed_by_key_and_metadata(url: str, api: openai.OpenAI) -> None:
    mine = [start(api, metadata={"number": str(number)}) for number in range(3)]
    listed = api.fine_tuning.jobs.list(limit=2)
    assert [job.id for job in listed.data] == [mine[2].id, mine[1].id]
    assert [job.id for job in api.fine_tuning.jobs.list(limit=1, after=mine[1].id).data] == [mine[0].id]
    assert [job.id for job in api.fine_tuning.jobs.list(metadata={"number": "1"})] == [mine[1].id]
    assert mine[0].id not in [job.id for job in api.fine_tuning.jobs.list(extra_query={"metadata": "null"})]
    for job in mine:
        api.fine_tuning.jobs.cancel(job.id)
    with sdk(url, KEYS[1]) as other:
        assert not {job.id for job in mine} & {job.id for job in other.fine_tuning.jobs.list()}
        with pytest.raises(openai.NotFoundError, match="Could not find fine tune"):
            other.fine_tuning.jobs.cancel(mine[0].id)
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            other.fine_tuning.jobs.create(model="tiny", training_file=mine[0].training_file)


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"model": "other"}, "model", "The model 'other' is not available for fine-tuning; it must be one of tiny."),
        ({"training_file": None}, "training_file", "training_file must be a string."),
        ({"hyperparameters": {"n_epochs": 51}}, None, 'n_epochs must be "auto" or an integer from 1 to 50.'),
        ({"hyperparameters": {"batch_size": True}}, None, 'batch_size must be "auto" or an integer from 1 to 256.'),
        (
            {"hyperparameters": {"learning_rate_multiplier": 0}},
            None,
            'learning_rate_multiplier must be "auto" or a number above 0 and up to 1000.',
        ),
        ({"method": {"type": "reinforcement"}}, "method.type", "must be one of 'supervised', 'dpo'."),
        ({"method": {"type": "dpo"}, "hyperparameters": {}}, "hyperparameters", "cannot both be given"),
        ({"method": {"type": "dpo", "supervised": {}}}, "method.supervised", "goes with the type 'supervised'"),
        ({"suffix": "a b"}, "suffix", "suffix may have letters, digits"),
        ({"suffix": "a" * 65}, "suffix", "suffix may have at most 64 characters."),
        ({"seed": -1}, "seed", "seed must be at least 0, not -1."),
        ({"integrations": [{"type": "wandb"}]}, "integrations", "integrations is not supported by this server."),
    ],
)
def test_a_wrong_request_says_what_is_wrong(url: str, changes: dict[str, Any], param: str | None, message: str) -> None:
    body = {"model": "tiny", "training_file": "file-0", **changes}
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    response = httpx.post(f"{url}/v1/fine_tuning/jobs", json=body, headers=headers)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert message in error["message"]
    assert param is None or error["param"] == param


def test_a_file_of_another_purpose_is_refused(api: openai.OpenAI) -> None:
    file_id = upload(api, chat(), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="training_file must have the purpose 'fine-tune'"):
        api.fine_tuning.jobs.create(model="tiny", training_file=file_id)


def test_a_job_whose_file_is_just_being_deleted_leaves_nothing(api: openai.OpenAI, data: Path) -> None:
    file_id = upload(api, chat())
    (data / "files" / file_id).unlink()
    before = set((data / "fine_tuning").iterdir())
    with pytest.raises(openai.NotFoundError) as missing:
        api.fine_tuning.jobs.create(model="tiny", training_file=file_id)
    assert missing.value.param == "training_file"
    assert set((data / "fine_tuning").iterdir()) == before


def test_without_the_option_there_is_no_fine_tuning(model: Path) -> None:
    response = call(FakeClient(always(HELLO)), settings_for(model), "GET", "/v1/fine_tuning/jobs")
    assert response.status_code == 403
    assert "--enable-fine-tuning turns it on" in response.json()["error"]["message"]


def test_options_that_do_not_go_together_are_refused_by_name(model: Path) -> None:
    for options, message in (
        ({"max_lora_rank": 8}, "--enable-fine-tuning needs a --max-lora-rank of at least 16"),
        ({"batch_invariant": True}, "--enable-fine-tuning cannot be used with --batch-invariant"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig(model=str(model), fine_tuned=True, **options).verify()


def test_a_model_that_does_not_fit_beside_the_server_on_a_gpu_is_refused(model: Path, tmp_path: Path) -> None:
    gpu = cast(Device, SimpleNamespace(name="cuda:0", device_name="Fake GPU"))
    launch = JobLaunch(
        folder=str(tmp_path),
        model=str(model),
        name="tiny",
        method="supervised",
        seed=0,
        share=0.5,
        num_cpus=1,
        device="cuda",
    )
    sent: list[FromJob] = []
    module = "tessera.app.training.job_process"
    with patch(f"{module}.select_device", lambda name: (gpu, name)), patch(f"{module}.free_memory", lambda _: 2**30):
        JobProcess(launch, sent.append, lambda: False).run()
    (failed,) = sent
    assert isinstance(failed, Failed)
    assert failed.code == "model_not_available"
    assert failed.message == (
        "tiny needs about 2.0 GiB of memory to be trained, on Fake GPU, and 1.0 GiB is available beside the server; a "
        "lower --gpu-memory-utilization leaves more"
    )


@pytest.mark.slow
def test_fault_fairness_a_long_job_lets_those_of_other_keys_have_their_turn(
    url: str, api: openai.OpenAI, succeeded: FineTuningJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it goes on afterwards it comes to the same weights."""
    monkeypatch.setattr(job_run, "TURN", 0.0)
    with sdk(url, KEYS[1]) as other:
        long = start(api, *LINES, method=METHOD, validation_file=upload(api, chat("the train")))
        waited(lambda: step_of(api, long) >= 1)
        short = until(other, start(other))
        assert short.status == "succeeded", short.error
        assert api.fine_tuning.jobs.retrieve(long.id).status not in ENDED
    long = until(api, long)
    assert long.status == "succeeded", long.error
    assert "The job waits while jobs of others have their turn." in messages(api, long)
    assert losses(api, long) == losses(api, succeeded)


def test_fault_fairness_files_are_not_read_for_ever_while_others_wait(
    url: str, api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_run, "MAX_READING", 0.0)
    endless = start(api, *[chat("the train is there")] * 20_000)
    with sdk(url, KEYS[1]) as other:
        waited(lambda: api.fine_tuning.jobs.retrieve(endless.id).status == "validating_files")
        start(other)
        failed = until(api, endless)
    assert failed.error is not None
    assert failed.error.message == job_run.READS_TOO_LONG
