"""LoRA adapters over HTTP: served beside the base, named in every API, loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models.tiny_adapters import TinyAdapter, merged_tensors
from tests.support.models.tiny_models import TINY_MODELS, make_tensors, prompt
from tests.support.references.llama_reference import logits_after
from tests.support.servers.server_fixture import Server, async_client, running_server, stream_answer

PROMPT = prompt()[:12]
LENGTH = 10
NAMES = ("one", "two", "three")
SHAPES = {
    **{f"self_attn.{name}_proj": (64, rows) for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))},
    "mlp.gate_proj": (64, 96),
    "mlp.up_proj": (64, 96),
    "mlp.down_proj": (96, 64),
}
MODULES = {f"model.layers.{layer}.{name}": shape for layer in range(3) for name, shape in SHAPES.items()}


@dataclass
class Adapted:
    """A server with the adapters one and two, room for two at a time, and the folder of a third.

    Attributes:
        expected: greedy tokens after PROMPT by each name, from merged weights in float64.
    """

    server: Server
    folders: dict[str, Path]
    expected: dict[str, list[int]]

    def tokens(self, model: str, **fields: Any) -> list[int]:
        return self.server.tokens(PROMPT, LENGTH, model=model, **fields)

    def load(self, name: str, folder: Path | str, **fields: Any) -> Any:
        body = {"lora_name": name, "lora_path": str(folder), **fields}
        return self.server.http.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> Any:
        return self.server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def greedy(config: dict[str, Any], tensors: dict[str, Any]) -> list[int]:
    token_ids = list(PROMPT)
    while len(token_ids) < len(PROMPT) + LENGTH:
        token_ids.append(int(np.argmax(logits_after(config, tensors, token_ids))))
    return token_ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def adapted(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    adapters = {name: TinyAdapter(MODULES, seed, rank=2 + 3 * seed) for seed, name in enumerate(NAMES)}
    folder = tmp_path_factory.mktemp("adapters")
    folders = {name: adapter.write(folder / name) for name, adapter in adapters.items()}
    config, tensors = json.loads((tiny_folder / "config.json").read_text()), make_tensors(TINY_MODELS["llama"])
    expected = {name: greedy(config, merged_tensors(adapter, tensors)) for name, adapter in adapters.items()}
    options = ["--num-kv-blocks", "512", "--max-loras", "2", "--max-cpu-loras", "1", "--allow-lora-loading"]
    options += [f"--lora={name}={folders[name]}" for name in ("one", "two")]
    with running_server(tiny_folder, folder / "log", *options) as server:
        expected[server.model] = greedy(config, tensors)
        yield Adapted(server, folders, expected)


def test_each_name_gives_the_tokens_of_its_merged_weights(adapted: Adapted) -> None:
    assert len({tuple(tokens) for tokens in adapted.expected.values()}) == 4
    for name in ("one", "two", adapted.server.model):
        assert adapted.tokens(name) == adapted.expected[name], name


def test_several_adapters_and_the_base_in_one_batch(adapted: Adapted) -> None:
    async def run() -> list[Any]:
        async with async_client(adapted.server) as client:
            bodies = [
                adapted.server.body(PROMPT, LENGTH, model=model, logprobs=2)
                for model in ("one", adapted.server.model, "two", "one", "two")
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json() for answer in answers]

    found = asyncio.run(run())
    for answer in found:
        assert answer["choices"][0]["token_ids"] == adapted.expected[answer["model"]], answer["model"]


def test_the_base_is_bit_for_bit_that_of_a_server_without_adapters(adapted: Adapted, tiny_server: Server) -> None:
    found = [server.post(server.body(PROMPT, LENGTH, logprobs=2)) for server in (adapted.server, tiny_server)]
    assert found[0]["choices"][0]["logprobs"] == found[1]["choices"][0]["logprobs"]


def test_prefixes_are_shared_within_an_adapter_alone(adapted: Adapted) -> None:
    token_ids = [3 + 5 * i % 90 for i in range(64)]
    used = []
    for model in ("one", "one", "two", adapted.server.model, "two"):
        usage = adapted.server.post(adapted.server.body(token_ids, 1, model=model))["usage"]
        used.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert used == [0, 48, 0, 0, 48]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"max_tokens": 8}),
        ("/v1/messages", {"max_tokens": 8}),
        ("/api/chat", {"stream": False, "options": {"num_predict": 8, "temperature": 0}}),
    ],
)
def test_every_api_takes_an_adapter_as_its_model(adapted: Adapted, path: str, fields: dict[str, Any]) -> None:
    def text(model: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": "Say a word."}], "temperature": 0, **fields}
        answer = adapted.server.post(body, path)
        assert answer["model"] == model
        for key in ("choices", "content", "message"):
            if key in answer:
                return json.dumps(answer[key])
        raise AssertionError(answer)

    assert text("one") == text("one")
    assert len({text(model) for model in ("one", "two", adapted.server.model)}) == 3


def test_responses_take_an_adapter_too(adapted: Adapted) -> None:
    body = {"input": "Say a word.", "max_output_tokens": 8, "temperature": 0, "store": False}
    texts = {
        adapted.server.post({**body, "model": model}, "/v1/responses")["output"][0]["content"][0]["text"]
        for model in ("one", adapted.server.model)
    }
    assert len(texts) == 2


def test_models_are_listed_with_their_parents(adapted: Adapted) -> None:
    listed = {model["id"]: model["parent"] for model in adapted.server.http.get("/v1/models").json()["data"]}
    assert listed == {adapted.server.model: None, "one": adapted.server.model, "two": adapted.server.model}
    assert adapted.server.http.get("/v1/models/two").json()["parent"] == adapted.server.model
    refused = adapted.server.http.post("/v1/embeddings", json={"model": "one", "input": "x"})
    assert refused.status_code == 400
    assert "is an adapter, which makes text alone" in refused.json()["error"]["message"]


def test_adapters_come_and_go(adapted: Adapted) -> None:
    """Three share two slots of the device and one place in host memory."""
    server = adapted.server
    unknown = server.http.post("/v1/completions", json=server.body(PROMPT, 1, model="three"))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    loaded = adapted.load("three", adapted.folders["three"])
    assert (loaded.status_code, loaded.json()["parent"]) == (200, server.model)
    for name in ("three", "one", "two", "three", server.model, "one"):
        assert adapted.tokens(name) == adapted.expected[name], name
    assert "is loaded already" in adapted.load("three", adapted.folders["three"]).json()["error"]["message"]
    assert adapted.load("three", adapted.folders["one"], load_inplace=True).status_code == 200
    assert adapted.tokens("three") == adapted.expected["one"]
    assert adapted.unload("three").json() == {"id": "three", "object": "model", "deleted": True}
    assert server.http.post("/v1/completions", json=server.body(PROMPT, 1, model="three")).status_code == 404
    assert adapted.unload("three").status_code == 404
    assert "A model is called" in adapted.load(server.model, adapted.folders["one"]).json()["error"]["message"]
    absent = adapted.load("other", "/absent").json()["error"]
    assert absent["message"] == "The adapter cannot be loaded: there is no folder /absent"
    assert absent["param"] == "lora_path"


def test_requests_that_have_begun_are_finished_after_unloading(adapted: Adapted) -> None:
    server = adapted.server
    assert adapted.load("gone", adapted.folders["two"]).status_code == 200

    async def run() -> list[int]:
        async with async_client(server) as client:
            begun = asyncio.Event()
            body = server.body(PROMPT, 200, model="gone")
            stream = asyncio.create_task(stream_answer(client, body, begun))
            await begun.wait()
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "gone"})
            assert gone.status_code == 200
            assert (await client.post("/v1/completions", json=body)).status_code == 404
            return (await stream).token_ids

    assert asyncio.run(run()) == server.tokens(PROMPT, 200, model="two")


def test_metrics_name_the_adapters_of_requests(adapted: Adapted) -> None:
    text = adapted.server.http.get("/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith("tessera:lora_requests_info{"))
    assert 'max_lora="2"' in line
    assert 'running_lora_adapters=""' in line
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if "lora_adapters{" in line)
    name = f'tessera:lora_adapters{{model_name="{adapted.server.model}",place='
    assert [counts[f'{name}"{place}"}}'] for place in ("all", "host", "device")] == ["2.0", "1.0", "2.0"]


def test_an_engine_that_is_started_again_has_the_same_adapters(adapted: Adapted) -> None:
    server = adapted.server
    assert adapted.load("three", adapted.folders["three"]).status_code == 200
    assert adapted.unload("one").status_code == 200
    pid = server.engine_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: server.engine_pid() not in (None, pid), "another engine")
    server.until(lambda: server.http.get("/ready").status_code == 200, "readiness")
    assert adapted.tokens("three") == adapted.expected["three"]
    names = [model["id"] for model in server.http.get("/v1/models").json()["data"]]
    assert sorted(names) == sorted([server.model, "two", "three"])


def test_without_the_option_nothing_is_loaded(tiny_server: Server, adapted: Adapted) -> None:
    body = {"lora_name": "one", "lora_path": str(adapted.folders["one"])}
    refused = tiny_server.http.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == 400
    assert "only on servers with --allow-lora-loading" in refused.json()["error"]["message"]
