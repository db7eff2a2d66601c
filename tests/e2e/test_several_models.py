"""Several models in one server: routed by name, loaded on demand, unloaded when idle or for room, failing apart."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.server_fixture import DEADLINE, Server, running_server, write_tiny_model

KEY = "sk-test"
FIRST, THIRD = 0, 2  # their places in the list
CONFIG = """
api-key: {key}
gpu-memory-utilization: 0.9
max-model-len: 512
models:
  - model: {folder}
    served-model-name: [first, also-first]
    preload: true
    gpu-memory-utilization: 0.5
  - model: {folder}
    served-model-name: second
    gpu-memory-utilization: 0.4
    max-num-seqs: 2
  - {{model: {folder}, served-model-name: third, gpu-memory-utilization: 0.4}}
  - {{model: {broken}, served-model-name: broken, gpu-memory-utilization: 0.1, max-model-len: 100000}}
"""


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(key=KEY, folder=tiny_folder, broken=write_tiny_model(folder / "broken")))
    options = ("--config", str(config), "--api-workers", "2", "--admin-port", "0")
    with running_server(None, folder / "log", *options) as server:
        server.model = "first"
        server.http.headers["authorization"] = f"Bearer {KEY}"
        server.until(lambda: server.children("tessera.app.server.worker"), "the second app process")
        yield server


def ask(server: Server, model: str, max_tokens: int = 2, **fields: Any) -> httpx.Response:
    """One of the app processes answers."""
    return server.http.post(
        "/v1/completions",
        json=server.body("Once", max_tokens, **{"model": model, **fields}),
        headers={"connection": "close"},
    )


def served_name(answer: httpx.Response) -> str:
    """The name of the model in an answer, which must be one."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])


def get(server: Server, path: str, **query: str) -> httpx.Response:
    """On a connection of its own, so that any app process may answer."""
    return server.http.get(path, params=query, headers={"connection": "close"})


def loaded(server: Server) -> set[str]:
    models = get(server, "/api/ps").json()["models"]
    return {name["name"].removesuffix(":latest") for name in models}


def until_all_know(server: Server, condition: Callable[[], Any], what: str) -> None:
    """Wait for the app processes, each of which hears of its engines by itself."""
    server.until(lambda: all(condition() for _ in range(4)), what)


def engines(server: Server) -> list[int]:
    return server.children("tessera.engine.ipc.process")


def test_models_are_loaded_on_demand_and_the_longest_unused_makes_room(server: Server) -> None:
    until_all_know(server, lambda: loaded(server) == {"first", "also-first"}, "the first model")
    named = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
    assert named == ["first", "also-first", "second", "third", "broken"]
    # A use ends a moment after its answer: of several in a row the last one ends after those before.
    for name in ("second", "also-first", "second", *["first"] * 8):
        assert served_name(ask(server, name)) == name
    until_all_know(server, lambda: loaded(server) == {"first", "also-first", "second"}, "the second model")
    assert served_name(ask(server, "third")) == "third"
    assert "the model second is unloaded: it makes room for third" in server.log
    until_all_know(server, lambda: loaded(server) == {"first", "also-first", "third"}, "the third model")
    assert len(engines(server)) == 2
    assert ask(server, "nobody").json()["error"]["code"] == "model_not_found"
    # The engine's own options are the entry's, those of the file's top otherwise.
    until_all_know(server, lambda: get(server, "/status.json", model="third").json()["engine"], "the third's facts")
    assert get(server, "/status.json", model="third").json()["engine"]["max_model_len"] == 512


def page(server: Server, url: str) -> str:
    """The metrics of the server or of its admin port."""
    return get(server, url + "/metrics").text


def shows(server: Server, url: str, lines: list[str]) -> bool:
    text = page(server, url)
    return all(line in text for line in lines)


def test_one_metrics_page_has_all_models_by_label(server: Server) -> None:
    found = re.search(r"for operators are on (http://\S+),", server.log)
    assert found is not None
    assert ask(server, "first").status_code == ask(server, "third").status_code == 200
    up = [f'tessera:engine_up{{model_name="{name}"}} 1.0' for name in ("first", "third")]
    for url in (server.url, found[1]):
        until_all_know(server, partial(shows, server, url, up), "both engines")
        text = page(server, url)
        assert text.count("# TYPE tessera:num_requests_running gauge") == 1
        for name in ("first", "third"):
            assert f'tessera:num_requests_running{{model_name="{name}"}}' in text
        assert 'engine_up{model_name="second"}' not in text, "what need not be up is not down"
        assert 'tessera:model_loaded{model_name="second"} 0.0' in text
        assert 'tessera:model_loaded{model_name="first"} 1.0' in text
        families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(families) == len(set(families)), "each family stands once"


def test_one_engines_crash_touches_no_other(server: Server) -> None:
    assert ask(server, "first").status_code == ask(server, "third").status_code == 200
    survivor = engine_of(server, FIRST)
    with server.stream(server.body("Once upon a time", 300)) as chunks:
        next(chunks)
        killed = engine_of(server, THIRD)
        os.kill(killed, signal.SIGKILL)
        server.until(lambda: killed not in engines(server), "the crash to be seen")
        assert server.http.get("/health").status_code == 200, "one of two still serves"
        assert sum(1 for _ in chunks) > 0
    server.until(lambda: ask(server, "third").status_code == 200, "the engine to be started again")
    assert engine_of(server, FIRST) == survivor


def engine_of(server: Server, index: int) -> int:
    """The engine process of a model: its run folder is called by the model's number."""
    (pid,) = (pid for pid in engines(server) if f"/{index}\0" in Path(f"/proc/{pid}/cmdline").read_text())
    return pid


def test_a_model_that_cannot_be_loaded_is_refused_and_the_reason_is_logged(server: Server) -> None:
    first = ask(server, "broken")
    assert (first.status_code, first.json()["error"]["code"]) == (503, "model_load_failed")
    assert "max-model-len" not in first.text
    assert re.search(r"the model broken could not be loaded: .*max-model-len", server.log)
    assert "it is tried again in" in ask(server, "broken").json()["error"]["message"]
    assert ask(server, "first").status_code == 200


def test_sleep_and_wake_up(server: Server) -> None:
    def sleeping(**query: str) -> bool:
        return bool(get(server, "/is_sleeping", **query).json()["is_sleeping"])

    assert ask(server, "first").status_code == 200
    assert server.http.post("/sleep", params={"model": "first", "level": "1"}).json() == {"is_sleeping": True}
    until_all_know(server, lambda: (sleeping(model="first"), sleeping()) == (True, False), "the model to sleep")
    server.until(lambda: all(ask(server, "first").status_code == 503 for _ in range(4)), "both processes to know")
    refused = ask(server, "first")
    assert refused.json()["error"]["code"] == "model_asleep"
    assert server.http.get("/ready").status_code == 200, "other models are served"
    assert server.http.post("/wake_up", params={"model": "first"}).json() == {"is_sleeping": False}
    assert ask(server, "first").status_code == 200
    assert server.http.post("/sleep", params={"model": "nobody"}).status_code == 404
    assert server.http.post("/sleep", params={"level": "9"}).json()["error"]["param"] == "level"
    bare = httpx.post(server.url + "/sleep", timeout=DEADLINE)
    assert bare.status_code == 401


def test_keep_alive_of_a_request_unloads_the_model(server: Server) -> None:
    assert ask(server, "first").status_code == 200
    answer = server.http.post("/api/generate", json={"model": "first:latest", "keep_alive": 0, "stream": False})
    assert answer.json()["done_reason"] == "unload"
    server.until(lambda: "first" not in loaded(server), "the model to be unloaded")
    assert re.search(r"the model first is unloaded: it was idle for \d+ s", server.log)
    kept = server.http.post("/api/generate", json={"model": "first", "keep_alive": "1h30m", "stream": False})
    assert (kept.status_code, kept.json()["done_reason"]) == (200, "load")
    server.until(lambda: "first" in loaded(server), "the model to be loaded")
    wrong = server.http.post("/api/generate", json={"model": "first", "keep_alive": "soon"})
    assert (wrong.status_code, "a duration such as 5m" in wrong.text) == (400, True)


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        (
            "[{model: A, served-model-nam: x}]",
            "line 2: there is no option served-model-nam; did you mean served-model-name",
        ),
        ("[]", "line 2: models must be a list of mappings"),
        ("[{model: A, port: 1}]", "there is no option port"),
        ("[{model: T}, {model: T}]", "two are called tiny: give each a served-model-name"),
        ("[{model: T, gpu-memory-utilization: 0.95}]", "has a gpu-memory-utilization of 0.95, more than the 0.9"),
        ("[{model: T, preload: true}, {model: T, served-model-name: b, preload: true}]", "those with preload have"),
        ("[{model: T, max-num-seqs: 9, max-num-batched-tokens: 8}]", "--max-num-batched-tokens"),
        ("[{model: T, model-keep-alive: soon}]", "model-keep-alive: must be a duration such as 5m"),
    ],
)
def test_what_is_wrong_with_the_list_is_said(
    tiny_folder: Path, tmp_path: Path, models: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tessera.app.cli.command import main

    config = tmp_path / "config.yaml"
    config.write_text("port: 0\nmodels: " + re.sub(r"\bT\b", str(tiny_folder), models) + "\n")
    try:
        code = main(["serve", "--config", str(config)])
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    assert complaint in capsys.readouterr().err
