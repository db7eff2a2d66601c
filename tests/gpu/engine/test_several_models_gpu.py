"""Several models of one server share a GPU: each in memory of its own share, the longest unused one sleeps for room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.servers.server_fixture import DEADLINE, Server, running_server

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
CONFIG = """
gpu-memory-utilization: 0.11
max-model-len: 512
max-num-seqs: 4
sleep-host-gib: 2
model-load-timeout: {deadline}
models:
  - {{model: {folder}, served-model-name: first, gpu-memory-utilization: 0.05}}
  - {{model: {folder}, served-model-name: second, gpu-memory-utilization: 0.05, dtype: bfloat16}}
  - {{model: {folder}, served-model-name: third, gpu-memory-utilization: 0.05}}
"""


@pytest.fixture(scope="module")
def server(cuda_device: CudaDevice, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=tiny_folder, deadline=DEADLINE))
    with running_server(None, folder / "log", "--config", str(config), "--device", "cuda") as server:
        yield server


def tokens(server: Server, model: str) -> list[int]:
    answer = server.post(server.body("Once upon a time", NUM_TOKENS, model=model))
    found: list[int] = answer["choices"][0]["token_ids"]
    assert len(found) == NUM_TOKENS
    return found


def loaded(server: Server) -> set[str]:
    models: list[dict[str, Any]] = server.http.get("/api/ps").json()["models"]
    return {model["name"].removesuffix(":latest") for model in models}


def test_a_model_that_makes_room_comes_back_with_its_tokens(server: Server) -> None:
    first, second = tokens(server, "first"), tokens(server, "second")
    assert loaded(server) == {"first", "second"}
    third = tokens(server, "third")
    assert third == first, "the same weights in the same dtype"
    server.until(lambda: loaded(server) == {"second", "third"}, "the first model to make room")
    assert tokens(server, "second") == second
    assert tokens(server, "first") == first


def test_a_sleeping_model_wakes_up(server: Server) -> None:
    before = tokens(server, "second")
    assert server.http.post("/sleep", params={"model": "second"}).status_code == 200
    server.until(lambda: "second" not in loaded(server), "the model to sleep")
    refused = server.http.post("/v1/completions", json=server.body("Once", 1, model="second"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
    assert server.http.post("/wake_up", params={"model": "second"}).status_code == 200
    assert tokens(server, "second") == before
