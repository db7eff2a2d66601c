"""Models that sleep with their weights in host memory: their engines stay, and are back without reading files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.server_fixture import Server, running_server

CONFIG = """
sleep-host-gib: 4
max-model-len: 512
models:
  - {{model: {folder}, served-model-name: first, preload: true}}
  - {{model: {folder}, served-model-name: second}}
"""


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sleep")
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=tiny_folder))
    with running_server(None, folder / "log", "--config", str(config)) as server:
        yield server


def ask(server: Server, model: str, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/completions", json=server.body("Once", 4, model=model, temperature=0, **fields))


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def engines(server: Server) -> list[int]:
    return server.children("tessera.engine.ipc.process")


def post(server: Server, path: str, **query: str) -> dict[str, Any]:
    answer = server.http.post(path, params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def metric(server: Server, name: str, model: str) -> Callable[[], float | None]:
    def value() -> float | None:
        start = f'tessera:{name}{{model_name="{model}"}} '
        lines = (line for line in server.http.get("/metrics").text.splitlines() if line.startswith(start))
        return next((float(line.split()[-1]) for line in lines), None)

    return value


def test_two_models_take_turns_on_the_device(server: Server) -> None:
    expected = text_of(ask(server, "first"))
    assert text_of(ask(server, "second")) == expected, "they are the same model"
    assert text_of(ask(server, "first")) == expected
    assert len(engines(server)) == 2
    assert "the model first is awake" in server.log
    assert "the model first is loaded" in server.log
    server.until(lambda: metric(server, "model_wakes_total", "first")() == 1, "the wakes to be counted")
    assert metric(server, "model_loads_total", "first")() == 1
    assert metric(server, "model_in_host_memory", "second")() == 1
    assert (metric(server, "model_host_memory_bytes", "second")() or 0) > 0


def test_levels_of_sleep(server: Server) -> None:
    expected = text_of(ask(server, "first"))
    before = engines(server)
    assert post(server, "/sleep", model="first", level="1") == {"is_sleeping": True}
    assert engines(server) == before
    reason = server.http.get("/status.json", params={"model": "first"}).json()["state"]["reason"]
    assert reason == "the model is asleep, its weights are in host memory"
    refused = ask(server, "first")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
    assert int(refused.headers["retry-after"]) > 0
    assert server.http.get("/ready").status_code == 200, "the other model can be loaded"
    assert post(server, "/reset_prefix_cache") == {"success": True}
    assert post(server, "/wake_up", model="first") == {"is_sleeping": False}
    assert text_of(ask(server, "first")) == expected
    assert engines(server) == before
    post(server, "/sleep", model="first", level="2")
    server.until(lambda: len(engines(server)) == 1, "the engine to be ended")
    assert server.http.get("/status.json", params={"model": "first"}).json()["state"]["reason"] == "the model is asleep"
    assert post(server, "/sleep") == {"is_sleeping": True}
    assert server.http.get("/ready").status_code == 503
    assert post(server, "/wake_up", model="first") == {"is_sleeping": False}
    assert text_of(ask(server, "first")) == expected
