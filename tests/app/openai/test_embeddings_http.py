"""WIRE.md point 15, /v1/embeddings over HTTP: shapes, errors, the openai SDK; the engine's client is a stand-in."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest

from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import EngineError, EngineUnavailableError, QueueFullError
from tessera.engine.contract.messages import NO_ACCOUNT, AccountRef, EmbedderRole
from tests.support.fakes.fake_client import INFO, FakeClient, always
from tests.support.servers.embedding_server import BESIDE, DIMENSION, MAIN, Vectors, cat, embedded, word_piece
from tests.support.servers.http_fixtures import call, ids, serve, settings_for, write_model_folder


@dataclasses.dataclass
class EmbedCall:
    inputs: list[list[int]]
    role: EmbedderRole


class EmbeddingClient(FakeClient):
    """Embeds a text as eight numbers made from its token ids, at unit length."""

    def __init__(self, error: Exception | None = None, **changes: Any) -> None:
        info = msgspec.structs.replace(INFO, **{"embeddings": (MAIN, BESIDE), **changes})
        super().__init__(always([]), info=info)
        self.calls: list[EmbedCall] = []
        self.error = error

    async def embed(
        self, inputs: Sequence[Sequence[int]], *, role: EmbedderRole = "main", account: AccountRef = NO_ACCOUNT
    ) -> Vectors:
        if self.error is not None:
            raise self.error
        self.calls.append(EmbedCall([[*token_ids] for token_ids in inputs], role))
        return embedded(inputs)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    folder = tmp_path_factory.mktemp("embeddings")
    encoder = folder / "encoder"
    encoder.mkdir()
    word_piece().save(str(encoder / "tokenizer.json"))
    return settings_for(
        write_model_folder(folder / "tiny"), embedding_folder=str(encoder), embedding_model_names=("encoder",)
    )


def post(client: FakeClient, settings: AppSettings, **body: Any) -> httpx.Response:
    return call(client, settings, "POST", "/v1/embeddings", json={"model": "tiny", **body})


def refused(response: httpx.Response, status: int, param: str | None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    message: str = error["message"]
    return message


# -- shapes ---------------------------------------------------------------------------------------


def test_the_answer_is_openais_object(settings: AppSettings) -> None:
    client = EmbeddingClient()
    answer = post(client, settings, input="hello", user="someone").json()
    assert set(answer) == {"object", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": len(ids("hello")), "total_tokens": len(ids("hello"))}
    (item,) = answer["data"]
    assert (item["object"], item["index"]) == ("embedding", 0)
    assert np.array_equal(np.array(item["embedding"], np.float32), embedded([ids("hello")])[0])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hello", [ids("hello")]),
        (["hello", "he"], [ids("hello"), ids("he")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["hello", [7, 8]], [ids("hello"), [7, 8]]),
    ],
    ids=str,
)
def test_input_is_text_or_token_ids_alone_or_in_a_list(given: Any, expected: Any, settings: AppSettings) -> None:
    client = EmbeddingClient()
    answer = post(client, settings, input=given).json()
    assert client.calls == [EmbedCall(expected, "main")]
    assert [item["index"] for item in answer["data"]] == list(range(len(expected)))
    assert answer["usage"]["total_tokens"] == sum(map(len, expected))


def test_wire_15_base64_is_little_endian_float32(settings: AppSettings) -> None:
    answer = post(EmbeddingClient(), settings, input=["hello", "he"], encoding_format="base64").json()
    for item, expected in zip(answer["data"], embedded([ids("hello"), ids("he")]), strict=True):
        assert base64.b64decode(item["embedding"], validate=True) == expected.astype("<f4").tobytes()


def test_the_encoder_beside_has_its_own_tokenizer_and_name(settings: AppSettings) -> None:
    client = EmbeddingClient()
    answer = post(client, settings, model="encoder", input=["The cat sat!", "a zx"]).json()
    assert client.calls == [EmbedCall([cat("the", "cat", "sat", "!"), cat("a", "z", "##x")], "beside")]
    assert answer["model"] == "encoder"
    models_listed = call(client, settings, "GET", "/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models_listed] == [("tiny", 128), ("encoder", 10)]
    assert call(client, settings, "GET", "/v1/models/encoder").json()["id"] == "encoder"


def test_special_tokens_may_be_left_out(settings: AppSettings) -> None:
    client = EmbeddingClient()
    post(client, settings, model="encoder", input="the cat", add_special_tokens=False)
    assert client.calls[0].inputs == [cat("the", "cat")[1:-1]]


# -- dimensions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8])
def test_wire_15_dimensions_cut_and_normalise_again(size: int, settings: AppSettings) -> None:
    answer = post(EmbeddingClient(), settings, model="encoder", input="cat", dimensions=size).json()
    found = np.array(answer["data"][0]["embedding"])
    expected = embedded([cat("cat")])[0][:size]
    assert len(found) == size
    assert np.allclose(found, expected / np.linalg.norm(expected), atol=1e-6)


def test_wire_15_dimensions_that_the_model_was_not_trained_for_are_refused(settings: AppSettings) -> None:
    response = post(EmbeddingClient(), settings, model="encoder", input="cat", dimensions=3)
    assert "one of 2, 4, 8" in refused(response, 400, "dimensions")
    assert "must be 8" in refused(post(EmbeddingClient(), settings, input="hello", dimensions=4), 400, "dimensions")
    assert post(EmbeddingClient(), settings, input="hello", dimensions=8).status_code == 200


# -- lengths --------------------------------------------------------------------------------------


def test_what_is_too_long_is_refused_unless_it_may_be_cut(settings: AppSettings) -> None:
    client = EmbeddingClient()
    response = post(client, settings, model="encoder", input=["cat", "cat " * 9])
    assert "at most 10 tokens, but input[1] has 11" in refused(response, 400, "input")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    post(client, settings, model="encoder", input="cat " * 9, truncate_prompt_tokens=-1)
    post(client, settings, model="encoder", input=["the cat sat on", "a"], truncate_prompt_tokens=4)
    post(client, settings, input=[1, 2, 3], truncate_prompt_tokens=2)
    assert [made.inputs for made in client.calls] == [
        [cat(*["cat"] * 8)],
        [cat("the", "cat"), cat("a")],
        [[1, 2]],
    ]


@pytest.mark.parametrize("keep", [0, -2, 1.5, "4", 11, 1])
def test_wrong_truncation_is_refused(keep: Any, settings: AppSettings) -> None:
    response = post(EmbeddingClient(), settings, model="encoder", input="cat", truncate_prompt_tokens=keep)
    refused(response, 400, "truncate_prompt_tokens")


def test_a_long_text_of_few_tokens_is_taken(settings: AppSettings) -> None:
    client = EmbeddingClient()
    assert post(client, settings, model="encoder", input=" " * 100_000 + "cat" + "x" * 5000).status_code == 200
    assert client.calls[0].inputs == [cat("[UNK]")]
    assert "1048576 characters" in refused(post(client, settings, input="x" * (2**20 + 1)), 400, "input")


# -- wrong requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hello", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "hello"]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": {"text": "hello"}}, "input"),
        ({"input": ["hello"] * 2049}, "input"),
        ({"input": [1] * 17}, "input"),
        ({"input": [512]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [2**70]}, "input"),
        ({"input": "hello", "model": 3}, "model"),
        ({"input": "hello", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "hello", "dimensions": 0}, "dimensions"),
        ({"input": "hello", "dimensions": "8"}, "dimensions"),
        ({"input": "hello", "user": 5}, "user"),
        ({"input": "hello", "normalize": False}, "normalize"),
        ({"input": "hello", "prompt_name": "query"}, "prompt_name"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_requests_name_the_field(body: dict[str, Any], param: str, settings: AppSettings) -> None:
    client = EmbeddingClient()
    content = json.dumps({"model": "tiny", **body})
    response = call(
        client, settings, "POST", "/v1/embeddings", content=content, headers={"content-type": "application/json"}
    )
    refused(response, 400, param)
    assert not client.calls


def test_null_is_the_default(settings: AppSettings) -> None:
    nothing = dict.fromkeys(("encoding_format", "dimensions", "user", "truncate_prompt_tokens", "add_special_tokens"))
    assert post(EmbeddingClient(), settings, input="hello", **nothing).status_code == 200


def test_an_unknown_model_is_404(settings: AppSettings) -> None:
    response = post(EmbeddingClient(), settings, model="gpt-9", input="hello")
    refused(response, 404, "model")
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_model_that_makes_no_embeddings_says_so(settings: AppSettings) -> None:
    refused(post(EmbeddingClient(embeddings=()), settings, input="hello"), 400, "model")


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    plain = settings_for(tmp_path)
    assert "token ids" in refused(post(EmbeddingClient(), plain, input="hello"), 400, "input")
    assert post(EmbeddingClient(), plain, input=[1, 2]).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineError("the engine process ended", code="engine_died"), 500),
        (EngineUnavailableError("starting"), 503),
        (QueueFullError("full", retry_after=3), 429),
    ],
    ids=str,
)
def test_the_engines_errors_come_through(error: Any, status: int, settings: AppSettings) -> None:
    response = post(EmbeddingClient(error), settings, input="hello")
    refused(response, status, None)
    if status != 500:
        assert "retry-after" in response.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
    ],
)
def test_text_is_not_asked_of_an_encoder(path: str, body: dict[str, Any], settings: AppSettings) -> None:
    beside = call(EmbeddingClient(), settings, "POST", path, json={"model": "encoder", **body})
    assert "/v1/embeddings" in refused(beside, 400, "model")
    alone = EmbeddingClient(generates=False, embeddings=(MAIN,))
    assert "/v1/embeddings" in refused(
        call(alone, settings, "POST", path, json={"model": "tiny", **body}), 400, "model"
    )
    assert call(alone, settings, "POST", "/tokenize", json={"prompt": "hello"}).json()["tokens"] == ids("hello")


# -- the SDK --------------------------------------------------------------------------------------


def test_wire_15_the_openai_sdk_asks_for_base64_and_gets_numbers(settings: AppSettings) -> None:
    client = EmbeddingClient()
    with serve(client, settings) as url, openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as sdk:
        answer = sdk.embeddings.create(model="tiny", input=["hello", "he"])
        plain = sdk.embeddings.create(model="tiny", input="hello", encoding_format="float")
        tokens = sdk.embeddings.create(model="tiny", input=[[5, 6], [7]], dimensions=DIMENSION)
        with pytest.raises(openai.BadRequestError, match="must not be empty"):
            sdk.embeddings.create(model="tiny", input="")
    expected = embedded([ids("hello"), ids("he")])
    assert np.array_equal(np.array([item.embedding for item in answer.data], np.float32), expected)
    assert np.array_equal(np.array(plain.data[0].embedding, np.float32), expected[0])
    assert answer.usage.prompt_tokens == len(ids("hello")) + len(ids("he"))
    assert np.array_equal(np.array([item.embedding for item in tokens.data], np.float32), embedded([[5, 6], [7]]))
