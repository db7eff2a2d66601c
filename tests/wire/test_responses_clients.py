"""What clients of /v1/responses send: tools of every type, all input items, sealed reasoning, the background."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import openai.types.responses
import pydantic
import pytest

from tessera.app.generate.sealing import PREFIX
from tessera.engine.contract.errors import QueueFullError
from tests.support.fakes.fake_client import play
from tests.support.servers.http_fixtures import ids, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import CALL, PATIENCE, WEATHER_PARAMETERS
from tests.wire.conftest import TEXT, Scripted, scripted

ASK: Any = {"model": "tiny", "input": "hi"}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": WEATHER_PARAMETERS}
NOTED = '<tool_call>\n{"name": "note", "arguments": {"input": "a\\nb"}}\n</tool_call>'
THOUGHT = "<think>hm, so</think>fine"


def test_a_namespace_of_tools(tool: Scripted) -> None:
    tool.says(CALL.replace("weather", "app__weather"))
    tools: Any = [{"type": "namespace", "name": "app", "description": "x", "tools": [WEATHER]}]
    answer = tool.http.post("/v1/responses", json={**ASK, "tools": tools}).json()
    assert "<tool>app__weather:" in tool.prompt
    (called,) = answer["output"]
    assert (called["name"], called["namespace"]) == ("weather", "app")
    assert answer["tools"][0]["tools"][0]["name"] == "weather"
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "rain"}
    items = [{"role": "user", "content": "hi"}, called, result]
    tool.http.post("/v1/responses", json={"model": "tiny", "input": items, "tools": tools})
    assert "<tool_call>app__weather Köln</tool_call>" in tool.prompt


def test_names_too_long_in_a_namespace_are_refused(tool: Scripted) -> None:
    tools: Any = [{"type": "namespace", "name": "n" * 100, "tools": [{**WEATHER, "name": "w" * 100}]}]
    error = tool.http.post("/v1/responses", json={**ASK, "tools": tools}).json()["error"]
    assert error["param"] == "tools[0]"


@pytest.mark.parametrize(
    "hosted",
    [
        "web_search",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "programmatic_tool_calling",
    ],
)
def test_hosted_tools_are_left_out(tool: Scripted, hosted: str, caplog: pytest.LogCaptureFixture) -> None:
    body = {**ASK, "tools": [{"type": hosted, "x": 1}, WEATHER]}
    with caplog.at_level(logging.WARNING):
        assert tool.http.post("/v1/responses", json=body).status_code == 200
    assert tool.prompt.count("<tool>") == 1
    error = tool.http.post("/v1/responses", json={**body, "tool_choice": {"type": hosted}}).json()["error"]
    assert error["param"] == "tool_choice"
    assert hosted in error["message"]


def test_hosted_tools_stand_in_the_response_without_their_secrets(tool: Scripted) -> None:
    """Clients with strict types refuse a tool that lacks what its type requires."""
    mcp: Any = {"type": "mcp", "server_label": "x", "server_url": "http://x", "allowed_tools": None}
    search: Any = {"type": "file_search", "vector_store_ids": ["vs_1"]}
    secrets: Any = {"authorization": "hush", "headers": {"x": "hush"}}
    sent = [{**mcp, **secrets}, search]
    more: Any = {"type": "additional_tools", "role": "developer", "tools": sent}
    answer = tool.http.post("/v1/responses", json={"input": [more, {"role": "user", "content": "hi"}], "tools": sent})
    assert answer.json()["tools"] == [mcp, search]
    pydantic.TypeAdapter(openai.types.responses.Response).validate_python(answer.json())
    assert "hush" not in tool.http.get(f"/v1/responses/{answer.json()['id']}/input_items").text


def test_tool_choice_of_no_form_is_refused_in_one_sentence(tool: Scripted) -> None:
    error = tool.http.post("/v1/responses", json={**ASK, "tools": [WEATHER], "tool_choice": {}}).json()["error"]
    assert error["param"] == "tool_choice"
    assert "literal" not in error["message"]
    assert '"allowed_tools"' in error["message"]


def test_custom_tools_there_and_back(tool: Scripted) -> None:
    tool.says(NOTED)
    tools: Any = [{"type": "custom", "name": "note", "description": "Takes notes"}]
    with tool.openai.responses.stream(**ASK, tools=tools) as stream:
        kinds = [event.type for event in stream]
        called = stream.get_final_response().output[0]
    assert "response.custom_tool_call_input.delta" in kinds
    assert kinds.count("response.custom_tool_call_input.done") == 1
    assert called.type == "custom_tool_call"
    assert (called.name, called.input) == ("note", "a\nb")
    result: Any = {"type": "custom_tool_call_output", "call_id": called.call_id, "output": "noted"}
    tool.openai.responses.create(model="tiny", input=[called.to_dict(), result], tools=tools)  # type: ignore[list-item]
    assert "<tool_call>note </tool_call><|im_end|>\n<|im_start|>tool\nnoted<|im_end|>" in tool.prompt


def test_items_that_the_model_cannot_use_are_left_out(tool: Scripted) -> None:
    items: Any = [
        {"role": "user", "content": "hi"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"},
        {"type": "program", "id": "pr_1", "call_id": "c0", "code": "1", "fingerprint": "x"},
        {"type": "program_output", "id": "po_1", "call_id": "c0", "result": "1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB-of-another-server"},
        {"type": "local_shell_call", "id": "l", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "l", "call_id": "c1", "output": "a.txt"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [
                {"type": "input_image", "image_url": "http://x/"},
                {"type": "encrypted_content", "encrypted_content": "x"},
                {"type": "input_text", "text": "seen"},
            ],
        },
        {"role": "user", "content": "so?"},
    ]
    assert tool.http.post("/v1/responses", json={"model": "tiny", "input": items}).status_code == 200
    assert tool.prompt == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<tool_call>local_shell </tool_call><|im_end|>\n"
        "<|im_start|>tool\na.txt<|im_end|>\n<|im_start|>tool\n"
        "[A part of type input_image was left out: this model reads text only.]\n"
        "[A part of type encrypted_content was left out: this model reads text only.]\nseen<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_additional_tools_among_the_items(tool: Scripted) -> None:
    """As Codex sends its tools to newer models: none in `tools`, all in the first item."""
    tool.says(CALL.replace("weather", "app__weather"))
    namespace: Any = {"type": "namespace", "name": "app", "tools": [WEATHER]}
    more: Any = {"type": "additional_tools", "role": "developer", "tools": [namespace, {"type": "web_search"}]}
    items: Any = [more, {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    again = [*items, {**more, "tools": [{**namespace, "tools": [{**WEATHER, "description": "newer"}]}]}]
    for sent in (items, again):
        answer = tool.http.post("/v1/responses", json={"model": "tiny", "input": sent, "tools": []}).json()
        assert tool.prompt.count("<tool>app__weather:") == 1
        (called,) = answer["output"]
        assert (called["name"], called["namespace"]) == ("weather", "app")
    listed = tool.http.get(f"/v1/responses/{answer['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed] == ["additional_tools", "message", "message", "additional_tools"]
    assert listed[0]["tools"][0]["tools"][0]["parameters"] == WEATHER_PARAMETERS


def test_tools_among_the_items_of_a_conversation(tool: Scripted) -> None:
    more: Any = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    conversation = tool.http.post("/v1/conversations", json={"items": [more]}).json()["id"]
    tool.http.post("/v1/responses", json={**ASK, "conversation": conversation})
    assert "<tool>weather:" in tool.prompt


def test_settings_are_no_history_in_which_an_image_could_be_left_out(tool: Scripted) -> None:
    more: Any = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    refused = tool.http.post("/v1/responses", json={"model": "tiny", "input": [more, IMAGE]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1].content")


def test_a_configuration_update_takes_the_place_of_the_requests_settings(tmp_path: Path) -> None:
    template = "{{ reasoning_effort }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    updates: Any = [
        {"type": "configuration_update", "reasoning": {"effort": "high"}, "text": text},
        {"type": "configuration_update", "reasoning": {}},
    ]
    items: Any = [{"role": "user", "content": "hi"}, *updates]
    with scripted(settings_for(write_model_folder(tmp_path, template=template))) as server:
        server.says("{}")
        answer = server.openai.responses.create(model="tiny", input=items, reasoning={"effort": "low"})
        assert server.prompt == "high|hi"
        assert server.params.grammar is not None
        listed = list(server.openai.responses.input_items.list(answer.id, order="asc"))
    assert listed[1].to_dict()["text"]["format"]["schema"] == {"type": "object"}  # type: ignore[index]


def test_results_of_tools_that_were_not_called(tool: Scripted) -> None:
    result: Any = {"type": "function_call_output", "name": "weather", "namespace": "app", "output": "rain"}
    items: Any = [{"role": "user", "content": "hi"}, result]
    answer = tool.openai.responses.create(model="tiny", input=items)
    assert "<|im_start|>tool\nrain<|im_end|>" in tool.prompt
    listed = list(tool.openai.responses.input_items.list(answer.id, order="asc"))
    assert (listed[1].to_dict()["name"], listed[1].to_dict()["namespace"]) == ("weather", "app")
    items[1] = {"type": "function_call_output", "output": "rain"}
    error = tool.http.post("/v1/responses", json={"model": "tiny", "input": items}).json()["error"]
    assert error["message"] == "input[1].call_id is required where there is no name of a tool."


def test_options_of_images_are_taken(tool: Scripted) -> None:
    assert tool.http.post("/v1/responses", json={**ASK, "image": {"context_compression": "auto"}}).status_code == 200


def test_a_trigger_of_a_compaction_is_refused_by_name(tool: Scripted) -> None:
    items: Any = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    error = tool.http.post("/v1/responses", json={"model": "tiny", "input": items}).json()["error"]
    assert error["message"].startswith("input[1] is of type 'compaction_trigger', but must have one of the types")


def test_references_to_items_of_stored_responses(tool: Scripted) -> None:
    """As the AI SDK continues a conversation."""
    tool.says(f"{THOUGHT} {CALL}")
    output = tool.http.post("/v1/responses", json={**ASK, "tools": [WEATHER]}).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    kinds: list[Any] = [{"type": "item_reference"}, {}, {"type": None}]
    references = [{**kind, "id": item["id"]} for kind, item in zip(kinds, output, strict=True)]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "rain"}
    items = [{"role": "user", "content": "hi"}, *references, result]
    tool.http.post("/v1/responses", json={"model": "tiny", "input": items})
    assert "<think>hm, so</think>fine<tool_call>weather Köln</tool_call><|im_end|>" in tool.prompt
    unknown = [{"type": "item_reference", "id": "msg_none"}]
    error = tool.http.post("/v1/responses", json={"model": "tiny", "input": unknown}).json()["error"]
    assert (error["param"], error["code"]) == ("input[0]", "item_not_found")


def test_sealed_reasoning_keeps_it_across_turns_without_storing(tool: Scripted) -> None:
    tool.says(THOUGHT)
    sealed = {"store": False, "include": ["reasoning.encrypted_content"]}
    output = tool.http.post("/v1/responses", json={**ASK, **sealed}).json()["output"]
    content = output[0]["encrypted_content"]
    assert b"hm, so" not in base64.urlsafe_b64decode(content.removeprefix(PREFIX))
    back = {"type": "reasoning", "id": output[0]["id"], "summary": [], "encrypted_content": content}
    items = [{"role": "user", "content": "hi"}, back, output[1], {"role": "user", "content": "so?"}]
    tool.http.post("/v1/responses", json={"model": "tiny", "input": items})
    assert "<think>hm, so</think>fine<|im_end|>" in tool.prompt
    back["encrypted_content"] = content[:-8] + "AAAAAAA="
    assert tool.http.post("/v1/responses", json={"model": "tiny", "input": items}).status_code == 200
    assert "<think>" not in tool.prompt, "what was changed on its way is left out"
    assert "encrypted_content" not in tool.http.post("/v1/responses", json=ASK).json()["output"][0]


def test_counting_input_tokens(tool: Scripted) -> None:
    count = tool.http.post("/v1/responses/input_tokens", json={**ASK, "tools": [WEATHER]}).json()
    tool.http.post("/v1/responses", json={**ASK, "tools": [WEATHER]})
    prompt = tool.engine.submissions[-1].prompt
    assert count == {"object": "response.input_tokens", "input_tokens": len(prompt)}


def test_compact_is_not_there(tool: Scripted) -> None:
    assert tool.http.post("/v1/responses/compact", json=ASK).status_code == 404


# In the background.


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Scripted]:
    """A model that says the beginning of TEXT, and goes on when its engine is told to."""
    with scripted(settings_for(write_model_folder(tmp_path))) as server:
        server.engine.hang = True
        server.plays(play(ids(TEXT), finish=None))
        yield server


def until(server: Scripted, response_id: str, status: str) -> Any:
    """The response once it has a status."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = server.openai.responses.retrieve(response_id)
        if found.status == status:
            return found
        threading.Event().wait(0.05)
    raise AssertionError(f"it never was {status}")


def test_background_is_polled(plain: Scripted) -> None:
    begun = plain.openai.responses.create(**ASK, background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    done = until(plain, begun.id, "completed")
    assert done.output_text == TEXT
    plain.openai.responses.create(**ASK, previous_response_id=begun.id)
    assert f"<|im_start|>assistant\n{TEXT}<|im_end|>" in plain.prompt


def test_background_goes_on_without_its_reader_and_is_resumed(plain: Scripted) -> None:
    stream = plain.openai.responses.create(**ASK, background=True, stream=True)
    first = next(iter(stream))
    stream.close()
    assert first.type == "response.created"
    until(plain, first.response.id, "completed")
    every = list(plain.openai.responses.retrieve(first.response.id, stream=True))
    assert [event.sequence_number for event in every] == list(range(len(every)))
    assert every[-1].type == "response.completed"
    rest = list(plain.openai.responses.retrieve(first.response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in rest] == list(range(4, len(every)))


def test_background_is_cancelled(slow: Scripted) -> None:
    begun = slow.openai.responses.create(**ASK, background=True)
    cancelled = slow.openai.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert slow.engine.submissions[0].aborted.wait(PATIENCE)
    assert slow.openai.responses.cancel(begun.id).status == "cancelled"
    kinds = [str(event.type) for event in slow.openai.responses.retrieve(begun.id, stream=True)]
    assert kinds[-1] == "response.cancelled"


def test_background_with_store_off_or_a_full_queue_is_refused(plain: Scripted) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        plain.openai.responses.create(**ASK, background=True, store=False)
    assert refused.value.param == "background"
    plain.plays([QueueFullError("full", retry_after=7)])
    with pytest.raises(openai.RateLimitError):
        plain.openai.responses.create(**ASK, background=True)


def test_a_synchronous_response_is_neither_cancelled_nor_streamed_again(plain: Scripted) -> None:
    answer = plain.openai.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        plain.openai.responses.cancel(answer.id)
    response: httpx.Response = plain.http.get(f"/v1/responses/{answer.id}?stream=true")
    assert response.status_code == 400


IMAGE: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}


def test_an_image_begins_no_conversation(tool: Scripted) -> None:
    for body in ({"input": [IMAGE]}, {"input": [{"role": "user", "content": "hi"}, IMAGE]}):
        answer = tool.http.post("/v1/responses", json={"model": "tiny", **body})
        assert answer.status_code == 400
        assert "part of type 'input_image', but this model reads text parts only" in answer.json()["error"]["message"]
    stored = tool.http.post("/v1/responses", json=ASK).json()["id"]
    refused = tool.http.post("/v1/responses", json={"input": [IMAGE], "previous_response_id": stored})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].content")


@pytest.mark.parametrize("place", [0, 2], ids=["history", "newest message"])
def test_images_do_not_end_a_session_whose_history_is_sent_again(tool: Scripted, place: int) -> None:
    items: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    items.append({"role": "user", "content": "so?"})
    items[place] = IMAGE
    answer = tool.http.post("/v1/responses", json={"model": "tiny", "input": items})
    assert answer.status_code == 200
    assert "<|im_start|>user\n[A part of type input_image was left out: this model reads text only.]" in tool.prompt
