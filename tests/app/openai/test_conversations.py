"""Stored conversations and chat completions through OpenAI's SDK: what is listed, whose it is, what deleting leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import ids, serve
from tests.support.servers.surface_fixtures import CALL, PATIENCE, WEATHER_PARAMETERS, prompt_of, says, tool_settings

HELLO: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "name": "weather", "parameters": WEATHER_PARAMETERS, "strict": None}
KEYS = ("mine", "yours")
IMAGE: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}


class Model:
    """A server with two keys, and a client for each.

    The clients' types are unions that no test narrows.
    """

    mine: Any
    yours: Any

    def __init__(self, engine: FakeClient, url: str) -> None:
        self.engine = engine
        self.mine, self.yours = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) for key in KEYS
        )
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        self.http = httpx.Client(base_url=f"{url}/v1", headers=headers, timeout=PATIENCE)

    def says(self, text: str) -> None:
        self.engine.script = always(play([*ids(text), 0], stop_token_id=0))

    @property
    def prompt(self) -> str:
        return prompt_of(self.engine)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    engine = says("one")
    with serve(engine, tool_settings(tmp_path_factory.mktemp("model"), api_keys=KEYS)) as url:
        model = Model(engine, url)
        with model.mine, model.yours, model.http:
            yield model


@pytest.fixture
def model(shared: Model) -> Model:
    shared.says("one")
    return shared


# Conversations.


@pytest.mark.parametrize("kind", [[[]], {}, 7, True])
def test_an_item_of_a_type_that_is_no_text_is_named(model: Model, kind: Any) -> None:
    made = model.mine.conversations.create()
    response = model.http.post(f"/conversations/{made.id}/items", json={"items": [{"type": kind, "id": "x"}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("items[0]")


def test_a_conversation_is_made_changed_and_deleted(model: Model) -> None:
    api = model.mine.conversations
    made = api.create(metadata={"topic": "x"}, items=HELLO)
    assert made.object == "conversation"
    assert api.retrieve(made.id) == made
    assert api.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert api.retrieve(made.id).metadata == {"topic": "y"}
    deleted = api.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    for call in (api.retrieve, api.delete, lambda each: list(api.items.list(each))):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    assert api.create().metadata == {}


def test_items_are_appended_listed_read_and_deleted(model: Model) -> None:
    api = model.mine.conversations
    made = api.create(items=HELLO)
    added = api.items.create(
        made.id,
        items=[
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "it rains", "annotations": []}]},
        ],
    )
    assert [item.type for item in added.data] == ["function_call", "function_call_output", "message"]
    found = list(api.items.list(made.id, order="asc", limit=2))
    assert [item.type for item in found] == ["message", *(item.type for item in added.data)]
    assert found[1:] == added.data
    assert [item.id for item in api.items.list(made.id)] == [item.id for item in found[::-1]]
    assert api.items.retrieve(found[2].id or "", conversation_id=made.id) == found[2]
    assert api.items.delete(found[2].id or "", conversation_id=made.id).id == made.id
    assert [item.id for item in api.items.list(made.id, order="asc")] == [found[0].id, found[1].id, found[3].id]
    for call in (api.items.retrieve, api.items.delete):
        with pytest.raises(openai.NotFoundError):
            call(found[2].id or "", conversation_id=made.id)
    with pytest.raises(openai.BadRequestError, match="after must be the id"):
        list(api.items.list(made.id, after=found[2].id or ""))
    api.items.create(made.id, items=[found[0].to_dict()])
    assert len({item.id for item in api.items.list(made.id)}) == 4, "an id that is taken is not used again"


@pytest.mark.parametrize("kind", ["whole", "streamed", "background"])
def test_a_response_continues_a_conversation_and_is_added_to_it(model: Model, kind: str) -> None:
    made = model.mine.conversations.create(items=[{"role": "system", "content": "be brief"}])
    ask: Any = {"model": "tiny", "input": "hi", "conversation": made.id}
    if kind == "streamed":
        with model.mine.responses.stream(**ask) as stream:
            first = stream.get_final_response()
    elif kind == "background":
        begun = model.mine.responses.create(**ask, background=True)
        first = list(model.mine.responses.retrieve(begun.id, stream=True))[-1].response
    else:
        first = model.mine.responses.create(**ask)
    assert first.conversation is not None
    assert first.conversation.id == made.id
    assert model.prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    model.mine.responses.create(model="tiny", input="more", conversation={"id": made.id}, store=False)
    turns = "user\nhi<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    assert model.prompt.endswith(f"{turns}<|im_start|>assistant\n")
    items = list(model.mine.conversations.items.list(made.id, order="asc"))
    assert [item.content[0].text for item in items] == ["be brief", "hi", "one", "more", "one"]
    assert items[2].id == first.output[0].id


def test_a_tool_loop_in_a_conversation(model: Model) -> None:
    made = model.mine.conversations.create()
    model.says(f"<think>hm</think>{CALL}")
    first = model.mine.responses.create(model="tiny", input="hi", conversation=made.id, tools=[TOOL])
    result: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain"}
    model.mine.responses.create(model="tiny", input=[result], conversation=made.id, tools=[TOOL])
    assert "<think>hm</think><tool_call>weather Köln</tool_call><|im_end|>\n<|im_start|>tool\nrain" in model.prompt
    reference: Any = {"type": "item_reference", "id": first.output[1].id}
    model.mine.responses.create(model="tiny", input=[*HELLO, reference], store=False)
    assert "<tool_call>weather Köln</tool_call>" in model.prompt


def test_images_in_a_conversation_do_not_end_it(model: Model) -> None:
    made = model.mine.conversations.create(items=[IMAGE])
    model.mine.responses.create(model="tiny", input="what is it?", conversation=made.id)
    assert "[A part of type input_image was left out" in model.prompt
    with pytest.raises(openai.BadRequestError, match="reads text parts only"):
        model.mine.responses.create(model="tiny", input=[IMAGE], conversation=made.id)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"conversation": "conv_0"}, 404, None),
        ({"conversation": 5}, 400, "conversation"),
        ({"conversation": "conv_0", "previous_response_id": "resp_0"}, 400, "previous_response_id"),
    ],
)
def test_a_conversation_that_cannot_be_continued(model: Model, body: Any, status: int, param: str | None) -> None:
    answer = model.http.post("/responses", json={"model": "tiny", "input": "hi", **body})
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": HELLO * 21}, "items"),
        ("", {"items": [{"type": "item_reference", "id": "x"}]}, "items[0]"),
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("/items", {"items": []}, "items"),
        ("/items", {}, "items"),
    ],
)
def test_wrong_items_are_refused(model: Model, path: str, body: Any, param: str) -> None:
    made = model.mine.conversations.create()
    answer = model.http.post(f"/conversations/{made.id}{path}" if path else "/conversations", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_conversations_belong_to_their_key(model: Model) -> None:
    made = model.mine.conversations.create(items=HELLO)
    (item,) = model.mine.conversations.items.list(made.id)
    theirs = model.yours.conversations
    for call in (
        lambda: theirs.retrieve(made.id),
        lambda: theirs.update(made.id, metadata={}),
        lambda: theirs.items.create(made.id, items=HELLO),
        lambda: theirs.items.delete(item.id or "", conversation_id=made.id),
        lambda: list(theirs.items.list(made.id)),
        lambda: theirs.delete(made.id),
        lambda: model.yours.responses.create(model="tiny", input="hi", conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    reference: Any = {"type": "item_reference", "id": item.id}
    with pytest.raises(openai.BadRequestError, match="not found"):
        model.yours.responses.create(model="tiny", input=[reference])
    assert list(model.mine.conversations.items.list(made.id)) == [item]


# Stored chat completions.


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_completion_is_stored_read_changed_and_deleted(model: Model, stream: bool) -> None:
    api = model.mine.chat.completions
    ask: Any = {"model": "tiny", "messages": [{"role": "system", "content": "be brief"}, *HELLO], "n": 2}
    model.says(f"<think>hm</think>so {CALL}")
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER_PARAMETERS}}]
    made: Any = api.create(**ask, store=True, metadata={"topic": "x"}, tools=tools, stream=stream)
    completion_id = [chunk.id for chunk in made][-1] if stream else made.id
    stored = api.retrieve(completion_id)
    assert stored.metadata == {"topic": "x"}
    assert [choice.message.content for choice in stored.choices] == ["so", "so"]
    assert [choice.message.tool_calls[0].function.name for choice in stored.choices] == ["weather"] * 2
    if not stream:
        assert stored.choices == made.choices
        assert stored.usage == made.usage
    messages = list(api.messages.list(completion_id, limit=1))
    assert [(each.role, each.content) for each in messages] == [("system", "be brief"), ("user", "hi")]
    assert len({each.id for each in messages}) == 2
    assert api.update(completion_id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert api.delete(completion_id).deleted is True
    for call in (api.retrieve, api.delete, lambda each: list(api.messages.list(each))):
        with pytest.raises(openai.NotFoundError):
            call(completion_id)


def test_only_what_asks_for_it_is_stored(model: Model) -> None:
    for store in ({}, {"store": False}, {"store": None}):
        made = model.mine.chat.completions.create(model="tiny", messages=HELLO, **store)
        with pytest.raises(openai.NotFoundError):
            model.mine.chat.completions.retrieve(made.id)


def test_stored_completions_are_listed_and_filtered(model: Model) -> None:
    api = model.yours.chat.completions  # whose list holds nothing else

    def store(**metadata: str) -> str:
        made = api.create(model="tiny", messages=HELLO, store=True, metadata=metadata)
        return str(made.id)

    made = [store(topic="x", number="0"), store(topic="y"), store(topic="x", number="2"), store()]
    assert [each.id for each in api.list()] == made
    assert [each.id for each in api.list(order="desc", limit=1)] == made[::-1]
    assert [each.id for each in api.list(metadata={"topic": "x"})] == [made[0], made[2]]
    assert [each.id for each in api.list(metadata={"topic": "x", "number": "2"})] == [made[2]]
    assert [each.id for each in api.list(model="tiny", after=made[1])] == made[2:]
    assert list(api.list(model="other")) == []
    page = api.list(limit=3)
    assert page.has_more
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "chatcmpl-0"}):
        with pytest.raises(openai.BadRequestError):
            api.list(**wrong)
    filters = {f"metadata[{number}]": "x" for number in range(17)}
    assert model.http.get("/chat/completions", params=filters).json()["error"]["param"] == "metadata"


def test_stored_completions_belong_to_their_key(model: Model) -> None:
    made = model.mine.chat.completions.create(model="tiny", messages=HELLO, store=True)
    theirs = model.yours.chat.completions
    for call in (
        lambda: theirs.retrieve(made.id),
        lambda: theirs.update(made.id, metadata={}),
        lambda: list(theirs.messages.list(made.id)),
        lambda: theirs.delete(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert made.id not in [each.id for each in theirs.list()]
    assert model.mine.chat.completions.retrieve(made.id).id == made.id
