"""Empty and degenerate prompts: elsewhere an assertion ended the engine (CVE-2024-8768)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.app.settings import AppSettings
from tests.faults.app_fixtures import post
from tests.support.fakes.fake_runner import Harness
from tests.support.models.tiny_models import VOCAB_SIZE
from tests.support.servers.http_fixtures import settings_for, write_model_folder
from tests.support.servers.server_fixture import Server

TEXT_OR_IDS: list[Any] = [None, "", [], [""], ["a", ""], [[]], [[5], []], [-1], [True], [1.5], [1, "a"], {"a": 1}, 5]
CONVERSATIONS: list[Any] = [
    None,
    [],
    "hi",
    ["hi"],
    [None],
    [{}],
    [{"content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "robot", "content": "x"}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [None]}],
]
CASES: list[tuple[str, str, dict[str, Any], list[Any]]] = [
    ("/v1/completions", "prompt", {}, TEXT_OR_IDS),
    ("/v1/embeddings", "input", {}, TEXT_OR_IDS),
    ("/v1/chat/completions", "messages", {}, CONVERSATIONS),
    ("/v1/messages", "messages", {"max_tokens": 4}, [*CONVERSATIONS, [{"role": "user", "content": []}]]),
    ("/v1/messages/count_tokens", "messages", {}, CONVERSATIONS),
    ("/v1/responses", "input", {}, [value for value in CONVERSATIONS if value != "hi"]),
    ("/tokenize", "messages", {}, CONVERSATIONS),
    ("/tokenize", "prompt", {}, [None, [], [5], {}, 5]),
    ("/detokenize", "tokens", {}, [None, "", [-1], [True], [1.5], ["a"], [[]], {}, 5]),
]
ALL = [(path, name, extra, value) for path, name, extra, values in CASES for value in values]


@pytest.mark.parametrize(("path", "name", "extra", "value"), ALL, ids=str)
def test_fault_degenerate_prompts_are_refused_by_name(
    settings: AppSettings, path: str, name: str, extra: dict[str, Any], value: Any
) -> None:
    response = post(settings, path, {name: value, **extra})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert name in (error.get("param") or error["message"])


def test_fault_degenerate_prompts_left_out_altogether(settings: AppSettings) -> None:
    for path, name, extra, _ in CASES:
        response = post(settings, path, extra)
        assert response.status_code == 400
        assert name in response.text or path == "/tokenize"


def test_fault_degenerate_prompts_that_come_to_no_tokens(tmp_path: Path) -> None:
    """A conversation of which the template leaves nothing, and one of no text at all, which is sound."""
    silent = settings_for(write_model_folder(tmp_path / "silent", template="{% if false %}x{% endif %}"))
    response = post(silent, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    spoken = settings_for(write_model_folder(tmp_path / "spoken"))
    body = {"messages": [{"role": "user", "content": ""}]}
    assert post(spoken, "/v1/chat/completions", body).status_code == 200


def test_fault_degenerate_prompts_leave_the_engine_alive(tiny_server: Server) -> None:
    expected = tiny_server.tokens([5, 6, 7], 8)
    pid = tiny_server.engine_pid()
    headers = {"content-type": "application/json"}
    for path, name, extra, value in [*ALL, ("/v1/completions", "prompt", {}, [VOCAB_SIZE])]:
        content = json.dumps({"model": tiny_server.model, name: value, **extra})
        response = tiny_server.http.post(path, content=content, headers=headers)
        assert response.status_code == 400, (path, value, response.text)
    assert tiny_server.engine_pid() == pid
    assert tiny_server.tokens([5, 6, 7], 8) == expected


@pytest.mark.parametrize("prompt", [[], [-1]])
def test_fault_degenerate_prompts_are_refused_by_the_engine_as_well(prompt: list[int]) -> None:
    """Whatever an app process lets through."""
    engine = Harness()
    engine.add("good", [1, 2, 3], 4, ignore_eos=True)
    engine.step()
    with pytest.raises(Exception, match="prompt"):
        engine.add("bad", prompt)
    engine.run()
    assert engine.finish_reasons == {"good": "length"}
