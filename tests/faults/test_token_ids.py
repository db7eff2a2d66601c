"""Token ids out of the vocabulary: they index device memory, where neighbours live."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import InvalidRequestError
from tessera.engine.contract.sampling_params import SamplingParams
from tests.faults.app_fixtures import EMBEDDING_INFO, post
from tests.support.models.tiny_models import VOCAB_SIZE, prompt
from tests.support.servers.server_fixture import Server, async_client

NUM_IDS = EMBEDDING_INFO.vocab_size
WRONG_IDS = [-1, NUM_IDS, 2**31, 2**32 + 1, 2**63, 2**64, -(2**63)]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


def fields_with(token_id: int) -> dict[str, Any]:
    """Every sampling field that takes token ids."""
    return {"stop_token_ids": [1, token_id], "logit_bias": {str(token_id): 1}, "allowed_token_ids": [token_id, 2]}


@pytest.mark.parametrize("token_id", WRONG_IDS)
@pytest.mark.parametrize("name", fields_with(0))
@pytest.mark.parametrize("path", PATHS)
def test_fault_token_ids_of_sampling_fields(settings: AppSettings, path: str, name: str, token_id: int) -> None:
    response = post(settings, path, {**PATHS[path], name: fields_with(token_id)[name]})
    assert response.status_code == 400, response.text
    assert name in response.json()["error"]["message"]


@pytest.mark.parametrize("token_id", WRONG_IDS)
@pytest.mark.parametrize(
    ("path", "name", "many"),
    [
        ("/v1/completions", "prompt", True),
        ("/v1/embeddings", "input", True),
        ("/detokenize", "tokens", False),
    ],
)
def test_fault_token_ids_of_prompts(settings: AppSettings, path: str, name: str, many: bool, token_id: int) -> None:
    for value in [[5, token_id], [[5], [token_id]]] if many else [[5, token_id]]:
        for extra in ({}, {"echo": True}) if name == "prompt" else ({},):
            response = post(settings, path, {name: value, **extra})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"].startswith(name)


@pytest.mark.parametrize("token_id", [-1, 100, 2**31, 2**63])
def test_fault_token_ids_are_checked_by_the_engine_as_well(token_id: int) -> None:
    """Whatever an app process lets through."""
    for fields in (
        {"stop_token_ids": (token_id,)},
        {"allowed_token_ids": (1, token_id)},
        {"logit_bias": {token_id: 1}},
    ):
        with pytest.raises(InvalidRequestError, match=f"token id {token_id}") as refused:
            SamplingParams(max_tokens=1, **fields).verify(vocab_size=100)
        assert refused.value.param in fields


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "seeded"])
def test_fault_token_ids_leave_neighbours_bit_identical(tiny_server: Server, sampling: dict[str, Any]) -> None:
    """While requests with every kind of wrong id come in, one gives the very tokens and log-probabilities."""
    watched = tiny_server.body(prompt()[:12], 60, logprobs=5, **sampling)
    wrong_ids = [VOCAB_SIZE if token_id == NUM_IDS else token_id for token_id in WRONG_IDS]
    wrong: list[dict[str, Any]] = [{"prompt": [5, token_id]} for token_id in wrong_ids]
    wrong += [{name: value} for token_id in wrong_ids for name, value in fields_with(token_id).items()]
    alone = tiny_server.post(watched)["choices"]
    pid = tiny_server.engine_pid()

    async def send(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return await client.post("/v1/completions", content=json.dumps(body), headers=headers)

    async def run() -> Any:
        async with async_client(tiny_server) as client:
            neighbour = asyncio.create_task(send(client, watched))
            sent = [send(client, {**tiny_server.body([5, 6], 4), **fields}) for fields in wrong]
            assert {response.status_code for response in await asyncio.gather(*sent)} == {400}
            return (await neighbour).json()["choices"]

    assert asyncio.run(run()) == alone
    assert tiny_server.engine_pid() == pid
