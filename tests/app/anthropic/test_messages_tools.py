"""Tools that Anthropic defines and the client runs, and reasoning that is not shown, through the SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import ids, serve, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import TOOL_TEMPLATE, prompt_of, says

ASK: Any = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
TEMPLATE = TOOL_TEMPLATE.replace("{{ tool.function.description }}", "{{ tool.function.parameters | tojson }}")
THOUGHT = "<think>hm, so</think>fine"


class Model:
    """One server; `says` decides the next completions. The types of `api` are unions that no test narrows."""

    def __init__(self, client: FakeClient, api: Any) -> None:
        self.client, self.api = client, api

    def says(self, text: str) -> None:
        self.client.script = always(play([*ids(text), 0], stop_token_id=0))

    def shown_tools(self) -> dict[str, Any]:
        """Parameters by name, as the prompt shows them."""
        pieces = prompt_of(self.client).split("<tool>")[1:]
        named = [piece.split("</tool>")[0].partition(": ") for piece in pieces]
        return {name: json.loads(parameters) for name, _, parameters in named}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    client = says("ok")
    settings = settings_for(write_model_folder(tmp_path_factory.mktemp("model"), template=TEMPLATE))
    with serve(client, settings) as url:
        yield Model(client, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "bash_20250124", "name": "bash"}, ["command", "restart"], []),
    (
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        ["command", "path", "file_text", "old_str", "new_str", "insert_line", "insert_text", "view_range"],
        ["command", "path"],
    ),
    (
        {"type": "memory_20250818", "name": "memory"},
        ["command", "path", "old_path", "new_path", "insert_line"],
        ["command"],
    ),
    (
        {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
        ["action", "coordinate", "text", "scroll_direction", "duration"],
        ["action"],
    ),
]


@pytest.mark.parametrize(("tool", "parameters", "required"), CASES, ids=[case[0]["name"] for case in CASES])
def test_client_tools_are_offered_as_functions(
    model: Model, tool: dict[str, Any], parameters: list[str], required: list[str]
) -> None:
    model.says("ok")
    model.api.beta.messages.create(**ASK, tools=[tool])
    shown = model.shown_tools()[tool["name"]]
    assert set(parameters) <= set(shown["properties"])
    assert shown["required"] == required


def test_the_commands_are_those_of_the_tools_version(model: Model) -> None:
    def commands(kind: str) -> list[str]:
        model.api.beta.messages.create(**ASK, tools=[{"type": kind, "name": "edit"}])
        return model.shown_tools()["edit"]["properties"]["command"]["enum"]

    model.says("ok")
    assert "undo_edit" in commands("text_editor_20250124")
    assert "undo_edit" not in commands("text_editor_20250728")
    assert "rename" in commands("memory_20250818")


def test_the_call_of_a_client_tool_and_its_result(model: Model) -> None:
    model.says('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    tools: Any = [{"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}]
    message = model.api.messages.create(**ASK, tools=tools, tool_choice={"type": "tool", "name": "bash"})
    (used,) = message.content
    assert used.type == "tool_use"
    assert (used.name, used.input) == ("bash", {"command": "ls"})
    assert list(model.shown_tools()) == ["bash"]  # the service's own tool is left out
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "a.txt"}
    history = [*ASK["messages"], {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    model.api.messages.create(**{**ASK, "messages": history}, tools=tools)
    assert "<|im_start|>tool\na.txt" in prompt_of(model.client)


@pytest.mark.parametrize(
    "kind", ["riddle_20250101", "bashful", "browser_toolset_20260801", "computer_toolset_20260801"]
)
def test_tools_of_unknown_types_are_refused(model: Model, kind: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        model.api.messages.create(**ASK, tools=[{"type": kind}])
    assert f"tools[0] has the type '{kind}', but only the client's own tools are supported: custom, bash_*" in str(
        refused.value
    )


def test_reasoning_that_is_omitted_comes_back_by_its_signature(model: Model) -> None:
    model.says(THOUGHT)
    omitted: Any = {"thinking": {"type": "adaptive", "display": "omitted"}}
    with model.api.messages.stream(**ASK, **omitted) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        message = stream.get_final_message()
    assert kinds[0] == "signature_delta"
    assert "thinking_delta" not in kinds
    thinking = message.content[0]
    assert thinking.type == "thinking"
    assert (thinking.thinking, message.content[1].text) == ("", "fine")
    assert model.api.messages.create(**ASK, **omitted).content[0].thinking == ""
    history = [*ASK["messages"], {"role": "assistant", "content": message.content}, ASK["messages"][0]]
    model.api.messages.create(**{**ASK, "messages": history}, **omitted)
    assert THOUGHT in prompt_of(model.client)
    foreign = [{"type": "thinking", "thinking": "", "signature": "EqQBCgIYAg=="}, {"type": "text", "text": "fine"}]
    history[1] = {"role": "assistant", "content": foreign}
    model.api.messages.create(**{**ASK, "messages": history}, **omitted)
    assert "<|im_start|>assistant\nfine" in prompt_of(model.client)
