"""/v1/batches with OpenAI's client over a scripted engine: results, errors, cancelling, expiry, and what interrupts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fastapi import Request
from openai.types import Batch

from tessera.app.generate.served_model import ServedModel
from tessera.app.generate.served_models import ServedModels
from tessera.app.http.body import LARGE_BODY, parse_json
from tessera.app.openai.batches import input_file, output_files, run, runner
from tessera.app.openai.batches.tables import (
    BATCHES_SCHEMA,
    LineResult,
    OwnerLostError,
    TokenUsage,
    candidates,
    claim,
    save_results,
)
from tessera.app.store.errors import StoreFullError
from tessera.app.store.objects import OBJECTS
from tessera.app.store.store import DATABASE_FILE
from tessera.engine.contract.errors import EngineError, EngineUnavailableError, QueueFullError
from tests.support.fakes.fake_client import FakeClient, Submission, play
from tests.support.servers.http_fixtures import TOKENIZER, ids, serve, settings_for, write_model_folder

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEYS = ("first", "second")
PATIENCE = 30.0
ENDED = ("completed", "failed", "expired", "cancelled")
DIED = EngineError("the engine process ended while it worked on this request", code="engine_died")


class Engine(FakeClient):
    """Repeats the last word of each prompt; `faults` are raised first, for prompts with the word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(self._answer, **options)
        self.faults: dict[str, list[Exception]] = {}
        self.words: list[str] = []

    def _answer(self, submission: Submission) -> Any:
        text = TOKENIZER.decode(submission.prompt).replace("assistant", "")
        word = text.split()[-1]
        self.words.append(word)
        if self.faults.get(word):
            return [self.faults[word].pop(0)]
        return play([*ids(word), 0], stop_token_id=0)

    async def embed(self, inputs: list[list[int]], *, role: str = "main", account: Any = None) -> Any:
        return np.full((len(inputs), 4), 0.5, np.float32)


@contextmanager
def batch_server(folder: Path, engine: FakeClient, **changes: Any) -> Iterator[str]:
    settings = {"api_keys": KEYS, "data_dir": str(folder / "data"), "batch_concurrency": 4, **changes}
    with serve(engine, settings_for(write_model_folder(folder / "model"), **settings)) as url:
        yield url


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Iterator[str]:
    with batch_server(tmp_path_factory.mktemp("batches"), engine, max_batch_lines=200) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with sdk(url) as client:
        yield client


@pytest.fixture
def api(client: openai.OpenAI, engine: Engine) -> openai.OpenAI:
    engine.faults.clear()
    engine.words.clear()
    return client


def sdk(url: str, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def line(custom_id: str, word: str = "so", url: str = TEXT, **changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny"}
    if url == CHAT:
        body["messages"] = [{"role": "user", "content": word}]
    else:
        body["prompt" if url == TEXT else "input"] = f"say {word}"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **changes}}


def upload(api: openai.OpenAI, lines: list[Any]) -> str:
    content = b"".join((each if type(each) is bytes else json.dumps(each).encode()) + b"\n" for each in lines)
    return api.files.create(file=("in.jsonl", content), purpose="batch").id


def start(api: openai.OpenAI, lines: list[Any], endpoint: Any = TEXT, **options: Any) -> Batch:
    file_id = upload(api, lines)
    return api.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **options)


def until(api: openai.OpenAI, batch: Batch, *statuses: str) -> Batch:
    end = time.monotonic() + PATIENCE
    while (batch := api.batches.retrieve(batch.id)).status not in statuses:
        assert time.monotonic() < end, batch
        threading.Event().wait(0.05)
    return batch


def waited(condition: Callable[[], bool]) -> None:
    """Until it is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.05)


def results(api: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """By custom_id, each of which must occur once."""
    if file_id is None:
        return {}
    found = [json.loads(text) for text in api.files.content(file_id).text.splitlines()]
    by_id = {result["custom_id"]: result for result in found}
    assert len(by_id) == len(found), "a line has two results"
    return by_id


def test_a_batch_from_upload_to_results(api: openai.OpenAI, engine: Engine) -> None:
    batch = start(api, [line(f"c{i}", f"word{i}") for i in range(50)], metadata={"for": "tests"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"for": "tests"})
    assert batch.expires_at == batch.created_at + 86400
    batch = until(api, batch, *ENDED)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.usage is not None
    assert batch.request_counts.model_dump() == {"total": 50, "completed": 50, "failed": 0}
    assert (batch.model, batch.errors, batch.error_file_id) == ("tiny", None, None)
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert batch.output_file_id is not None
    output = results(api, batch.output_file_id)
    assert list(output) == [f"c{i}" for i in range(50)], "in the order of the input"
    for i, result in enumerate(output.values()):
        assert result["id"].startswith("batch_req_")
        assert (result["error"], result["response"]["status_code"]) == (None, 200)
        assert result["response"]["body"]["choices"][0]["text"] == f"word{i}"
    tokens = [result["response"]["body"]["usage"] for result in output.values()]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in tokens)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in tokens)
    file = api.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert {submission.priority for submission in engine.submissions} == {2**32}, "after interactive requests"


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/responses", "/v1/embeddings"])
def test_other_endpoints(api: openai.OpenAI, endpoint: str, engine: Engine) -> None:
    batch = until(api, start(api, [line("a", url=endpoint), line("b", url=endpoint)], endpoint), *ENDED)
    kind = {CHAT: "chat.completion", "/v1/responses": "response", "/v1/embeddings": "list"}[endpoint]
    output, errors = results(api, batch.output_file_id), results(api, batch.error_file_id)
    if endpoint == "/v1/embeddings":  # which this model does not make: an error of each line
        assert {result["response"]["status_code"] for result in errors.values()} == {400}
    else:
        assert [result["response"]["body"]["object"] for result in output.values()] == [kind, kind]
    assert {*output, *errors} == {"a", "b"}


def test_lines_that_fail_are_in_the_error_file(api: openai.OpenAI, engine: Engine) -> None:
    engine.faults = {"poison": [EngineError("the logits are not finite")]}
    lines = [
        line("good"),
        line("wrong", temperature="hot"),
        line("streamed", stream=True),
        line("poisoned", "poison"),
    ]
    batch = until(api, start(api, lines), *ENDED)
    assert (batch.status, batch.request_counts and batch.request_counts.failed) == ("completed", 3)
    assert set(results(api, batch.output_file_id)) == {"good"}
    errors = results(api, batch.error_file_id)
    responses = {name: result["response"] for name, result in errors.items()}
    assert {name: response["status_code"] for name, response in responses.items()} == {
        "wrong": 400,
        "streamed": 400,
        "poisoned": 500,
    }
    assert responses["wrong"]["body"]["error"]["param"] == "temperature"
    assert responses["streamed"]["body"]["error"]["message"] == "stream is not supported in a batch."
    assert all(result["error"] is None for result in errors.values())


def test_everything_wrong_with_a_file_is_reported_before_a_line_runs(api: openai.OpenAI, engine: Engine) -> None:
    lines = [
        line("a"),
        b"{not json",
        b"",
        b"[1]",
        {"custom_id": "x"},
        line("a"),
        {**line("b"), "method": "GET"},
        {**line("c"), "url": CHAT},
        line("d", model="another"),
        {**line("e"), "custom_id": 5},
        {**line("f"), "body": {}},
    ]
    batch = until(api, start(api, lines), *ENDED)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.object == "list"
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (4, "invalid_json_line", None),
        (5, "missing_required_parameter", "method"),
        (6, "duplicate_custom_id", "custom_id"),
        (7, "invalid_method", "method"),
        (8, "invalid_url", "url"),
        (9, "mismatched_model", "body.model"),
        (10, "invalid_custom_id", "custom_id"),
        (11, "missing_required_parameter", "body.model"),
    ]
    assert batch.errors.data[0].message == "This line is not parseable as valid JSON."
    assert not engine.words


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([b""], "empty_file"),
        ([line(f"c{i}") for i in range(201)], "too_many_tasks"),
        ([line("a", model="unknown")], "model_not_found"),
        ([b"x" * (16 * 2**20 + 1)], "invalid_json_line"),
    ],
)
def test_files_that_cannot_be_run(api: openai.OpenAI, lines: list[Any], code: str) -> None:
    batch = until(api, start(api, lines), *ENDED)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == [code]


def test_wrong_requests(api: openai.OpenAI, url: str) -> None:
    file_id = upload(api, [line("a")])
    other = api.files.create(file=b"x", purpose="user_data").id
    right = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}
    for changes, status, param in (
        ({"input_file_id": "file-0"}, 404, "input_file_id"),
        ({"input_file_id": other}, 400, "input_file_id"),
        ({"input_file_id": 5}, 400, "input_file_id"),
        ({"endpoint": "/v1/models"}, 400, "endpoint"),
        ({"completion_window": "24"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 59}}, 400, "output_expires_after.seconds"),
    ):
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        refused = httpx.post(f"{url}/v1/batches", json={**right, **changes}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text


def test_lists_and_owners(api: openai.OpenAI, url: str) -> None:
    made = [until(api, start(api, [line("a")]), *ENDED).id for _ in range(3)]
    assert [batch.id for batch in api.batches.list(limit=1)][:3] == made[::-1], "the client asks for page after page"
    assert api.batches.list(after=made[1]).data[0].id == made[0]
    with sdk(url, KEYS[1]) as other:
        assert not other.batches.list().data
        for use in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match=f"No batch found with id '{made[0]}'"):
                use(made[0])
        with pytest.raises(openai.BadRequestError):
            other.batches.list(after=made[0])


def test_a_finished_batch_cannot_be_cancelled(api: openai.OpenAI) -> None:
    batch = until(api, start(api, [line("a")]), *ENDED)
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
        api.batches.cancel(batch.id)


def test_the_files_of_results_expire_as_asked(api: openai.OpenAI) -> None:
    batch = start(api, [line("a")], output_expires_after={"anchor": "created_at", "seconds": 3600})
    output = api.files.retrieve(until(api, batch, *ENDED).output_file_id or "")
    assert output.expires_at == output.created_at + 3600


def test_the_input_may_be_deleted_once_the_batch_is_created(api: openai.OpenAI) -> None:
    batch = start(api, [line(f"c{i}") for i in range(100)])
    api.files.delete(batch.input_file_id)
    assert len(results(api, until(api, batch, *ENDED).output_file_id)) == 100


def test_cancelling_keeps_what_has_run(tmp_path: Path) -> None:
    class Slow(Engine):
        def _answer(self, submission: Submission) -> Any:
            answer = super()._answer(submission)
            return [] if self.words[-1] == "hang" else answer

    engine = Slow(hang=True)
    with batch_server(tmp_path, engine) as url, sdk(url) as api:
        batch = start(api, [line("a"), line("b"), *(line(f"h{i}", "hang") for i in range(20))])
        while not (counts := api.batches.retrieve(batch.id).request_counts) or counts.completed < 2:
            threading.Event().wait(0.05)
        assert len(engine.words) <= 2 + 4, "no more than --batch-concurrency at a time"
        assert api.batches.cancel(batch.id).status == "cancelling"
        batch = until(api, batch, "cancelled")
        assert batch.cancelled_at is not None
        assert set(results(api, batch.output_file_id)) == {"a", "b"}
        errors = results(api, batch.error_file_id)
        assert set(errors) == {f"h{i}" for i in range(20)}
        assert {result["error"]["code"] for result in errors.values()} == {"batch_cancelled"}
        assert all(submission.aborted.wait(PATIENCE) for submission in engine.submissions[2:])


def test_what_has_not_run_in_time_expires(tmp_path: Path) -> None:
    engine = Engine()
    engine.well = False
    with batch_server(tmp_path, engine) as url, sdk(url) as api:
        batch = until(api, start(api, [line("a"), line("b")]), "in_progress")
        with sqlite3.connect(tmp_path / "data" / DATABASE_FILE) as database:
            database.execute("UPDATE batches SET deadline = ?", (time.time(),))
    with batch_server(tmp_path, engine) as url, sdk(url) as api:
        batch = until(api, batch, "expired")
        errors = results(api, batch.error_file_id)
        assert {name: result["error"]["code"] for name, result in errors.items()} == dict.fromkeys(
            "ab", "batch_expired"
        )
        assert all(result["response"] is None for result in errors.values())


def test_fault_stalls_large_lines_are_parsed_in_a_thread(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 16 MB took 100 to 500 ms of the event loop."""
    threads: dict[bool, set[str]] = {False: set(), True: set()}

    def note(text: bytes) -> Any:
        threads[len(text) > LARGE_BODY].add(threading.current_thread().name.partition("_")[0])
        return parse_json(text)

    monkeypatch.setattr("tessera.app.http.body.parse_json", note)
    batch = until(api, start(api, [line("a", ignored="a" * LARGE_BODY), line("b")]), "completed")
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 2
    assert threads[True] == {"body"}
    assert threads[False]


def test_lines_are_tried_again_while_the_engine_is_away(api: openai.OpenAI, engine: Engine) -> None:
    engine.faults = {
        "died": [DIED, DIED],
        "full": [QueueFullError("the queue is full")],
        "starting": [EngineUnavailableError("the engine is starting")],
    }
    batch = until(api, start(api, [line(word, word) for word in (*engine.faults, "well")]), *ENDED)
    assert len(results(api, batch.output_file_id)) == 4
    assert batch.error_file_id is None


def test_a_line_that_kills_the_engine_fails_alone(api: openai.OpenAI, engine: Engine) -> None:
    engine.faults = {"killer": [DIED] * 100, "bystander": [DIED] * 4}
    lines = [line("k", "killer"), line("b", "bystander"), *(line(f"c{i}") for i in range(20))]
    batch = until(api, start(api, lines), *ENDED)
    errors = results(api, batch.error_file_id)
    assert set(errors) == {"k"}
    assert errors["k"]["response"]["body"]["error"]["code"] == "engine_died"
    assert len(results(api, batch.output_file_id)) == 21


def test_a_batch_goes_on_after_a_restart_with_the_lines_that_are_left(tmp_path: Path) -> None:
    first = Engine()
    first.faults = {"late": [QueueFullError("the queue is full")] * 10**6}
    with batch_server(tmp_path, first) as url, sdk(url) as api:
        batch = start(api, [*(line(f"c{i}", f"word{i}") for i in range(40)), line("d", "late")])
        while not (counts := api.batches.retrieve(batch.id).request_counts) or counts.completed < 40:
            threading.Event().wait(0.05)
    second = Engine()
    with batch_server(tmp_path, second) as url, sdk(url) as api:
        batch = until(api, batch, *ENDED)
        assert list(results(api, batch.output_file_id)) == [*(f"c{i}" for i in range(40)), "d"]
    assert second.words == ["late"]


def test_results_wait_in_hand_while_the_disk_is_full(
    api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    refusals = iter(range(3))

    def refuse(*arguments: Any, **options: Any) -> Any:
        if next(refusals, None) is not None:
            raise StoreFullError
        return save_results(*arguments, **options)

    monkeypatch.setattr(run, "save_results", refuse)
    monkeypatch.setattr(run, "SAVE_RETRY_DELAY", 0.01)
    batch = until(api, start(api, [line(f"c{i}") for i in range(20)]), *ENDED)
    assert len(results(api, batch.output_file_id)) == 20
    assert len(engine.words) == 20, "nothing ran twice"


def test_fault_full_disk_results_beyond_the_limit_of_their_key_wait_until_it_deletes_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or until the batch is cancelled."""
    monkeypatch.setattr(run, "SAVE_RETRY_DELAY", 0.01)
    monkeypatch.setattr(runner, "RETRY_DELAY", 0.01)
    limit = 10**4
    engine = Engine()

    def stored() -> int:
        with sqlite3.connect(tmp_path / "data" / DATABASE_FILE) as database:
            (num_bytes,) = database.execute("SELECT SUM(bytes) FROM usage").fetchone()
        return int(num_bytes)

    with batch_server(tmp_path, engine, key_data_limit=limit / 2**30) as url, sdk(url) as api:
        kept = api.files.create(file=b"x" * (limit - 2000), purpose="user_data")
        lines = [line(f"c{i}", "long" * 20, n=100) for i in range(2)]
        batch = start(api, [lines[0]])
        waited(lambda: len(engine.words) == 100)
        assert api.batches.retrieve(batch.id).status == "in_progress"
        cancelled = start(api, [lines[1]])
        waited(lambda: len(engine.words) == 200)
        assert stored() < 2 * limit
        api.batches.cancel(cancelled.id)
        assert until(api, cancelled, *ENDED).status == "cancelled"
        api.files.delete(kept.id)
        batch = until(api, batch, "completed")
        assert set(results(api, batch.output_file_id)) == {"c0"}
        assert stored() < 2 * limit


def test_results_are_held_and_written_a_few_at_a_time(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_UNSAVED_BYTES", 1)
    monkeypatch.setattr(run, "SAVE_INTERVAL", 0.01)
    monkeypatch.setattr(output_files, "BYTES_AT_ONCE", 1)
    batch = until(api, start(api, [line(f"c{i}") for i in range(30)]), *ENDED)
    assert list(results(api, batch.output_file_id)) == [f"c{i}" for i in range(30)]


def test_fault_unbounded_numbers_any_length_of_blank_and_done_lines_is_read_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_file, "READ_BYTES", 2)
    path = tmp_path / "lines"
    path.write_bytes(b"{}\n" * 5000 + b"\n" * 5000 + b"[]\n")
    lines = list(input_file.read_lines(path, 100, range(2, 5001)))
    assert [(each.number, each.text) for each in lines] == [(1, b"{}\n"), (10001, b"[]\n")]


def test_an_owner_that_was_replaced_can_store_nothing(tmp_path: Path) -> None:
    engine = Engine()
    engine.well = False
    with batch_server(tmp_path, engine) as url, sdk(url) as api:
        until(api, start(api, [line("a"), line("b")]), "in_progress")
    database = sqlite3.connect(tmp_path / "data" / DATABASE_FILE, isolation_level=None)
    (seq,) = database.execute("SELECT seq FROM batches").fetchone()
    assert claim(database, seq, "first") is not None
    result = LineResult(1, False, b"{}\n", TokenUsage(1))
    for _ in range(2):  # the same line twice
        assert save_results(database, seq, "first", [result]) == "in_progress"
    assert database.execute("SELECT completed, input_tokens FROM batches").fetchone() == (1, 1)
    assert claim(database, seq, "second") is not None
    with pytest.raises(OwnerLostError):
        save_results(database, seq, "first", [LineResult(2, False, b"{}\n", TokenUsage())])
    assert database.execute("SELECT COUNT(*) FROM batch_results").fetchone() == (1,)
    database.close()


def test_no_tenant_waits_for_all_batches_of_another_and_servers_run_those_of_their_models() -> None:
    database = sqlite3.connect(":memory:", isolation_level=None)
    for schema in (OBJECTS, BATCHES_SCHEMA):
        for statement in schema.migrations[0]:
            database.execute(statement)
    rows = [("a", "m", 9), ("a", "m", 9), ("a", "m", 9), ("b", "m", 9), ("b", "n", 9), ("b", "n", -9)]
    for seq, (tenant, models, rest) in enumerate(rows, start=1):
        database.execute(
            "INSERT INTO batches (seq, tenant, status, models, deadline) VALUES (?, ?, 'validating', ?, ?)",
            (seq, tenant, models, time.time() + rest),
        )
    found = candidates(database, "m", limit=10)
    assert found == [(1, "a"), (4, "b"), (2, "a"), (6, "b"), (3, "a")], "6 is over, which any server can end"
    assert candidates(database, "n", limit=1) == [(5, "b")]
    database.close()


def test_fault_fairness_a_key_with_all_places_gives_one_up_for_another_keys_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of its lines under way, or of the patience with them."""
    monkeypatch.setattr(runner, "MAX_RUNNING", 2)
    monkeypatch.setattr(runner, "LEAVE_PATIENCE", 0.01)

    class Stuck(Engine):
        is_stuck = True

        def _answer(self, submission: Submission) -> Any:
            answer = super()._answer(submission)
            return [] if self.is_stuck and self.words[-1] == "hang" else answer

    engine = Stuck(hang=True)
    with batch_server(tmp_path, engine, batch_concurrency=64) as url, sdk(url) as heavy, sdk(url, KEYS[1]) as light:
        batches = [start(heavy, [line(f"h{i}", "hang") for i in range(4)]) for _ in range(3)]
        while engine.words.count("hang") < 8:
            threading.Event().wait(0.05)
        batch = until(light, start(light, [line("a"), line("b")]), *ENDED)
        assert set(results(light, batch.output_file_id)) == {"a", "b"}
        assert all(heavy.batches.retrieve(each.id).status not in ENDED for each in batches)


def test_fault_fairness_batches_take_turns_where_there_are_more_keys_than_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_RUNNING", 1)
    monkeypatch.setattr(runner, "TURN", 0.0)
    monkeypatch.setattr(runner, "LOOK_INTERVAL", 0.01)
    all_sent = threading.Event()

    class Waiting(Engine):
        def _answer(self, submission: Submission) -> Any:
            return super()._answer(submission) if all_sent.is_set() else [QueueFullError("the queue is full")]

    engine = Waiting()
    with batch_server(tmp_path, engine) as url, sdk(url) as first, sdk(url, KEYS[1]) as second:
        apis = {"first": first, "second": second}
        lines = {word: [line(f"{word}{i}", word) for i in range(300)] for word in apis}
        batches = {word: start(api, lines[word]) for word, api in apis.items()}
        all_sent.set()
        for word, api in apis.items():
            batch = until(api, batches[word], *ENDED)
            assert list(results(api, batch.output_file_id)) == [each["custom_id"] for each in lines[word]]
    assert engine.words.count("first") == engine.words.count("second") == 300, "nothing ran twice"
    assert engine.words.index("second") < len(engine.words) - 1 - engine.words[::-1].index("first"), "in turns"


def test_fault_fairness_lines_that_wait_for_an_engine_leave_their_slots_to_others(tmp_path: Path) -> None:
    engine = Engine()
    engine.faults = {"late": [EngineUnavailableError("asleep")] * 10**6}
    with batch_server(tmp_path, engine, batch_concurrency=1) as url, sdk(url) as api:
        waiting = start(api, [line("a", "late")])
        while not engine.words:
            threading.Event().wait(0.05)
        until(api, start(api, [line("b")]), "completed")
        assert api.batches.retrieve(waiting.id).status == "in_progress"


def test_fault_fairness_lines_whose_model_has_no_room_leave_their_slots_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, waiting = ServedModels.hold, list[str]()

    async def hold_late(models: ServedModels, request: Request, model: ServedModel) -> None:
        tenant = request.scope["state"]["tenant"]
        if not waiting or tenant in waiting:
            waiting.append(tenant)
            await asyncio.get_running_loop().create_future()
        await hold(models, request, model)

    monkeypatch.setattr(ServedModels, "hold", hold_late)
    with batch_server(tmp_path, Engine(), batch_concurrency=1) as url, sdk(url) as api, sdk(url, KEYS[1]) as other:
        late = start(api, [line("a")])
        waited(lambda: bool(waiting))
        until(other, start(other, [line("b")]), "completed")
        assert api.batches.retrieve(late.id).status == "in_progress"


def test_the_input_goes_with_the_end_of_the_batch_or_the_batch_fails_without_it(tmp_path: Path) -> None:
    engine = Engine()
    files = tmp_path / "data" / "files"
    with batch_server(tmp_path, engine) as url, sdk(url) as api:
        done = until(api, start(api, [line("a")]), *ENDED)
        engine.well = False
        waiting = until(api, start(api, [line("a")]), "in_progress")
    with batch_server(tmp_path, engine) as url, sdk(url) as api:  # which cleans when it starts
        end = time.monotonic() + PATIENCE
        while (files / done.id).exists():
            assert time.monotonic() < end
            threading.Event().wait(0.05)
    (files / waiting.id).unlink()
    with batch_server(tmp_path, engine) as url, sdk(url) as api:
        lost = until(api, waiting, *ENDED)
        assert lost.errors is not None
        assert lost.errors.data is not None
        assert (lost.status, lost.errors.data[0].code) == ("failed", "file_not_found")
