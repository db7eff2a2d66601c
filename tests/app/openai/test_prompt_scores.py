"""`prompt_logprobs`, and `echo` with `logprobs`: the form of what a prompt's own tokens were worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tessera.app.settings import AppSettings
from tessera.engine.contract.messages import PromptScores, RequestOutput, TokenLogprobs
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, events, ids, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import ROOMY

PROMPT = "aü b"
NULL = {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


@pytest.fixture
def settings(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path))


def scored(text: str, answer: str) -> list[RequestOutput]:
    """The answer's outputs, the first with the prompt's scores."""
    outputs = play(ids(answer), finish="length", logprobs=True)
    found = [TokenLogprobs(token_id, -1.5, 3, [1, 0], [-0.25, -0.5]) for token_id in ids(text)[1:]]
    return [msgspec.structs.replace(outputs[0], prompt_logprobs=[PromptScores.of(found)]), *outputs[1:]]


def post(settings: AppSettings, path: str, outputs: list[RequestOutput], **body: Any) -> tuple[FakeClient, Any]:
    client = FakeClient(always(outputs), info=ROOMY)
    return client, call(client, settings, "POST", path, json={"model": "tiny", **body})


def test_prompt_logprobs_have_null_first_and_then_tokens_by_id(settings: AppSettings) -> None:
    client, response = post(settings, "/v1/completions", scored(PROMPT, "x"), prompt=PROMPT, prompt_logprobs=1)
    (choice,) = response.json()["choices"]
    rows = choice["prompt_logprobs"]
    assert client.submissions[0].params.prompt_logprobs == 1
    assert len(rows) == len(ids(PROMPT)) == 5
    assert rows[0] is None
    assert rows[3] == {
        str(ids(" ")[0]): {"logprob": -1.5, "rank": 3, "decoded_token": " "},
        "1": {"logprob": -0.25, "rank": 1, "decoded_token": "<|im_start|>"},
    }
    assert rows[1][str(ids("ü")[0])]["decoded_token"] == "\\xc3"
    assert choice["logprobs"] is None


def test_prompt_logprobs_of_a_chat_are_beside_its_choices(settings: AppSettings) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "n": 2}
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    client, response = post(settings, "/v1/chat/completions", scored(rendered, "x"), **body)
    assert [s.params.prompt_logprobs for s in client.submissions] == [0, None], "the prompt is scored once"
    rows = response.json()["prompt_logprobs"]
    assert len(rows) == len(client.submissions[0].prompt)
    assert rows[0] is None
    assert all(len(row) == 1 for row in rows[1:])
    _, plain = post(settings, "/v1/chat/completions", play(ids("x")), messages=body["messages"])
    assert "prompt_logprobs" not in plain.json()


@pytest.mark.parametrize("stream", [False, True])
def test_wire_11_echo_with_logprobs(settings: AppSettings, stream: bool) -> None:
    body = {"prompt": [PROMPT, ids(PROMPT)], "echo": True, "logprobs": 1, "n": 2, "stream": stream}
    client, response = post(settings, "/v1/completions", scored(PROMPT, "x"), **body)
    expected = [1, 1, 1, 1] if stream else [1, None, 1, None]
    assert [s.params.prompt_logprobs for s in client.submissions] == expected
    texts = [""] * 4
    logprobs: list[dict[str, list[Any]]] = [{} for _ in texts]
    for answer in events(response.content) if stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                logprobs[choice["index"]].setdefault(name, []).extend(values)
    assert texts == [PROMPT + "x"] * 4
    for each in logprobs:
        assert {name: values[:1] for name, values in each.items()} == NULL
        assert each["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xbc", " ", "b", "x"]
        assert each["token_logprobs"] == [None, -1.5, -1.5, -1.5, -1.5, -0.5]
        assert each["top_logprobs"][4] == {"b": -1.5, "<|im_start|>": -0.25}
        assert each["text_offset"] == [0, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_at_all_may_be_asked_for_where_the_prompt_is(settings: AppSettings, stream: bool) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream, "return_token_ids": True}
    client, response = post(settings, "/v1/completions", scored(PROMPT, "x"), **body)
    assert client.submissions[0].params.max_tokens == 1
    chunks = events(response.content) if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert not any(chunk["choices"][0].get("token_ids") for chunk in chunks)
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [value for each in logprobs for value in each["token_logprobs"]] == [None, -1.5, -1.5, -1.5, -1.5]
    if not stream:
        assert chunks[0]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": -2}, "prompt_logprobs"),
        (
            "/v1/completions",
            {"prompt_logprobs": -1, "prompt": "a" * 514},
            "at most 262144 log-probabilities, not",
        ),
        ("/v1/completions", {"prompt_logprobs": -1, "prompt": ["ab"] * 513}, "at most 262144 log-probabilities"),
        ("/v1/completions", {"logprob_token_ids": [5]}, "logprob_token_ids"),
        ("/v1/completions", {"logprob_token_ids": [512], "logprobs": 1}, "logprob_token_ids"),
        ("/v1/completions", {"logprob_token_ids": [5] * 129, "logprobs": 1}, "logprob_token_ids"),
        ("/v1/chat/completions", {"logprob_token_ids": [5]}, "logprob_token_ids"),
        ("/v1/completions", {"echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ("/v1/responses", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/messages", {"prompt_logprobs": 1, "max_tokens": 5}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    settings: AppSettings, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt: Any = "a" if path == "/v1/completions" else [{"role": "user", "content": "a"}]
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    client, response = post(settings, path, play(ids("x")), **{name: prompt, **fields})
    assert response.status_code == 400
    assert param in response.json()["error"]["message"]
    assert not client.submissions


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_whole_vocabulary(settings: AppSettings, path: str) -> None:
    def script(submission: Any) -> list[RequestOutput]:
        every = list(range(ROOMY.vocab_size))
        found = [TokenLogprobs(token_id, -1.5, 3, every, [-0.25] * len(every)) for token_id in submission.prompt[1:]]
        (output,) = play(ids("x"), finish="length")
        return [msgspec.structs.replace(output, prompt_logprobs=[PromptScores.of(found)])]

    client = FakeClient(script, info=ROOMY)
    body: dict[str, Any] = {"prompt": PROMPT, "messages": [{"role": "user", "content": "a"}], "prompt_logprobs": -1}
    response = call(client, settings, "POST", path, json={"model": "tiny", **body})
    assert client.submissions[0].params.prompt_logprobs == ROOMY.vocab_size
    answer = response.json()
    rows = (answer if "chat" in path else answer["choices"][0])["prompt_logprobs"]
    assert rows[0] is None
    assert [set(map(int, row)) for row in rows[1:]] == [set(range(ROOMY.vocab_size))] * (len(rows) - 1)


NAMED = [ids("l")[0], ids("h")[0]]


def named_play() -> list[RequestOutput]:
    """An answer whose alternatives are the named ids, as the engine gives them."""
    outputs = play(ids("ok"), finish="length", logprobs=True)
    rows = [
        [TokenLogprobs(row.token_id, -0.5, 1, NAMED, [-7.0, -8.0]) for row in out.logprobs or ()] for out in outputs
    ]
    return [msgspec.structs.replace(out, logprobs=row) for out, row in zip(outputs, rows, strict=True)]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_named_ids(settings: AppSettings, stream: bool) -> None:
    fields: dict[str, Any] = {"logprob_token_ids": NAMED, "stream": stream}
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    client, response = post(settings, "/v1/chat/completions", named_play(), **chat, **fields)
    (params,) = (submission.params for submission in client.submissions)
    assert (params.logprobs, params.logprob_token_ids) == (0, tuple(NAMED))
    answers = events(response.content) if stream else [response.json()]
    content = [row for answer in answers for row in (answer["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [row["token"] for row in content] == ["o", "k"]
    assert [[(top["token"], top["logprob"]) for top in row["top_logprobs"]] for row in content] == [
        [("l", -7.0), ("h", -8.0)]
    ] * 2
    _, response = post(settings, "/v1/completions", named_play(), prompt="a", logprobs=0, **fields)
    answers = events(response.content) if stream else [response.json()]
    found = [
        top for each in answers for top in (each["choices"][0]["logprobs"] or {"top_logprobs": []})["top_logprobs"]
    ]
    assert found == [{"l": -7.0, "h": -8.0, "o": -0.5}, {"l": -7.0, "h": -8.0, "k": -0.5}]
