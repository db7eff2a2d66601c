"""What the official SDKs do with answers on their users' behalf, on the model that comes with the project."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import anthropic
import anyio
import openai
import pytest
from pydantic import BaseModel, Field

from tessera.engine.contract.errors import QueueFullError
from tests.support.fakes.fake_client import play
from tests.support.servers.http_fixtures import ids
from tests.support.servers.server_fixture import DEADLINE, Server
from tests.support.servers.surface_fixtures import CALL, OTHER_CALL
from tests.wire.conftest import TEXT, Scripted
from tests.wire.requests import ASK, CHAT

MODEL = "tessera-builtin"
SUM = "2 + 3 = 5"
ADD: Any = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}
WHO: Any = {**ADD, "messages": [{"role": "user", "content": "My name is Anna, I am 31. Who am I?"}]}
LEFT_OUT: Any = {"model": MODEL, "messages": ADD["messages"], "max_tokens": 20, "extra_body": {"temperature": 0}}


class Person(BaseModel):
    name: str = Field(max_length=12)
    mood: Literal["good", "bad"]


class Weather(BaseModel):
    """Get the weather of a city."""

    city: str


WEATHER: Any = openai.pydantic_function_tool(Weather, name="weather")
ASK_WEATHER: Any = {**ADD, "messages": [{"role": "user", "content": "What is the weather in Bonn?"}]}


class Sdks:
    """Clients of both SDKs of one server; the asynchronous ones are made where they are used."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self.common: Any = {"api_key": "unused", "max_retries": 0, "timeout": DEADLINE}
        self.url = server.url
        self.openai = stack.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", **self.common))
        self.anthropic = stack.enter_context(anthropic.Anthropic(base_url=self.url, **self.common))

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **self.common)

    def async_anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, **self.common)


@pytest.fixture(scope="module")
def sdks(builtin_server: Server) -> Iterator[Sdks]:
    with ExitStack() as stack:
        yield Sdks(builtin_server, stack)


# -- chat completions -----------------------------------------------------------------------------


def test_chat_stream_gathers_text_and_usage(sdks: Sdks) -> None:
    with sdks.openai.chat.completions.stream(**ADD, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == SUM
    assert [event.content for event in events if event.type == "content.done"] == [SUM]
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == (SUM, "stop")
    assert final.usage is not None
    assert final.usage.completion_tokens > 0


def test_chat_stream_gathers_logprobs(sdks: Sdks) -> None:
    with sdks.openai.chat.completions.stream(**ADD, logprobs=True, top_logprobs=1) as stream:
        done = [event for event in stream if event.type == "logprobs.content.done"]
        final = stream.get_final_completion().choices[0]
    assert len(done) == 1
    assert final.logprobs is not None
    assert "".join(entry.token for entry in final.logprobs.content or []) == SUM


@pytest.mark.parametrize("beta", [False, True])
def test_chat_parse_gives_an_object_of_the_class(sdks: Sdks, beta: bool) -> None:
    api: Any = sdks.openai.beta.chat.completions if beta else sdks.openai.chat.completions
    message = api.parse(**WHO, response_format=Person).choices[0].message
    assert isinstance(message.parsed, Person)
    assert Person.model_validate_json(message.content) == message.parsed


def test_chat_stream_parses_as_it_grows(sdks: Sdks) -> None:
    with sdks.openai.chat.completions.stream(**WHO, response_format=Person) as stream:
        seen = [event.parsed for event in stream if event.type == "content.delta" and event.parsed]
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Person)
    assert seen[-1] == parsed.model_dump()
    assert len(seen) > 2


def test_chat_parse_reads_tool_calls(sdks: Sdks) -> None:
    answer = sdks.openai.chat.completions.parse(**ASK_WEATHER, tools=[WEATHER], tool_choice="required")
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls or []
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)


def test_chat_stream_reads_tool_calls(sdks: Sdks) -> None:
    with sdks.openai.chat.completions.stream(**ASK_WEATHER, tools=[WEATHER], tool_choice="required") as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    calls = message.tool_calls or []
    assert len(done) == len(calls) > 0
    assert len(pieces) > len(done), "arguments come in pieces"
    assert all(isinstance(event.parsed_arguments, Weather) for event in done)
    first = "".join(piece.arguments_delta for piece in pieces if piece.index == 0)
    assert first == calls[0].function.arguments


def test_chat_stream_tells_two_calls_apart(tool: Scripted) -> None:
    tool.says(CALL + OTHER_CALL)
    with tool.openai.chat.completions.stream(**CHAT, tools=[WEATHER]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.parsed_arguments) for event in done] == [
        (0, Weather(city="Köln")),
        (1, Weather(city="Bonn")),
    ]


@pytest.mark.parametrize("helper", ["parse", "stream"])
def test_chat_helpers_raise_where_an_answer_was_cut(sdks: Sdks, helper: str) -> None:
    fields: Any = {**WHO, "response_format": Person, "max_completion_tokens": 2}
    ask: Callable[[], object]
    with ExitStack() as stack:
        if helper == "stream":
            ask = stack.enter_context(sdks.openai.chat.completions.stream(**fields)).until_done
        else:
            ask = partial(sdks.openai.chat.completions.parse, **fields)
        with pytest.raises(openai.LengthFinishReasonError):
            ask()


def test_a_closed_stream_ends_the_work(plain: Scripted) -> None:
    plain.engine.hang = True
    plain.plays(play(ids("abc"), finish=None))
    try:
        with plain.openai.chat.completions.create(**CHAT, stream=True) as stream:
            next(iter(stream))
        assert plain.engine.submissions[0].aborted.wait(DEADLINE)
    finally:
        plain.engine.hang = False


# -- responses and messages -----------------------------------------------------------------------


def test_responses_stream(sdks: Sdks) -> None:
    with sdks.openai.responses.stream(model=MODEL, input="What is 2 + 3?", temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert all(final.output_text.startswith(snapshot) for snapshot in snapshots)  # tokens that come together are one
    assert snapshots[-1] == final.output_text == SUM


def test_responses_parse_and_stream_of_an_object(sdks: Sdks) -> None:
    fields: Any = {"model": MODEL, "input": WHO["messages"][0]["content"], "temperature": 0, "text_format": Person}
    parsed = sdks.openai.responses.parse(**fields).output_parsed
    assert isinstance(parsed, Person)
    with sdks.openai.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_parsed == parsed


def test_responses_stream_of_a_tool_call(sdks: Sdks) -> None:
    function = openai.pydantic_function_tool(Weather, name="weather")["function"]
    weather: Any = {"type": "function", **function}
    question = ASK_WEATHER["messages"][0]["content"]
    with sdks.openai.responses.stream(
        model=MODEL, input=question, tools=[weather], tool_choice="required", temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        (call, *_) = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds
    assert call.type == "function_call"
    assert Weather.model_validate_json(call.arguments)


def test_messages_stream(sdks: Sdks) -> None:
    with sdks.anthropic.messages.stream(**LEFT_OUT) as stream:
        assert "".join(stream.text_stream) == SUM
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0


def test_messages_stream_of_a_tool_call(sdks: Sdks) -> None:
    tool: Any = {"name": "weather", "description": "Of a city.", "input_schema": Weather.model_json_schema()}
    fields = {**LEFT_OUT, "messages": ASK_WEATHER["messages"], "max_tokens": 60}
    for _ in range(5):  # a busy machine may bring all tokens of one at once
        with sdks.anthropic.messages.stream(**fields, tools=[tool], tool_choice={"type": "any"}) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        assert final.stop_reason == "tool_use"
        (block, *_) = [block for block in final.content if block.type == "tool_use"]
        assert Weather.model_validate(block.input)
        if len(pieces) > 1:
            return
    pytest.fail("the arguments came in one piece each time")


def test_messages_parse(sdks: Sdks) -> None:
    fields = {**LEFT_OUT, "messages": WHO["messages"], "max_tokens": 60}
    message = sdks.anthropic.messages.parse(**fields, output_format=Person)
    assert isinstance(message.parsed_output, Person)


def test_messages_tool_runner_runs_the_tool_and_answers(tool: Scripted) -> None:
    seen = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        seen.append(city)
        tool.says("Rain in Köln.")
        return "rain"

    tool.says(CALL)
    runner = tool.anthropic.beta.messages.tool_runner(**CHAT, max_tokens=50, tools=[weather])
    assert runner.until_done().content[0].text == "Rain in Köln."
    assert seen == ["Köln"]
    assert "<|im_start|>tool\nrain<|im_end|>" in tool.prompt
    assert "<|im_start|>user\nhi" in tool.prompt, "the SDK sends the whole conversation: there are no threads"


def test_count_tokens_is_what_a_message_costs(sdks: Sdks) -> None:
    for messages in (ADD["messages"], WHO["messages"]):
        counted = sdks.anthropic.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.")
        usage = sdks.anthropic.messages.create(model=MODEL, messages=messages, system="Be brief.", max_tokens=1).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


# -- asynchronous clients -------------------------------------------------------------------------


def test_async_helpers_many_at_once(sdks: Sdks) -> None:
    async def run() -> list[Any]:
        async with sdks.async_openai() as api, sdks.async_anthropic() as claude:

            async def whole() -> Any:
                return (await api.chat.completions.create(**ADD)).choices[0].message.content

            async def chunks() -> Any:
                stream = await api.chat.completions.create(**ADD, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            async def chat() -> Any:
                async with api.chat.completions.stream(**ADD) as stream:
                    return (await stream.get_final_completion()).choices[0].message.content

            async def responses() -> Any:
                async with api.responses.stream(model=MODEL, input="What is 2 + 3?", temperature=0) as stream:
                    return (await stream.get_final_response()).output_text

            async def messages() -> Any:
                async with claude.messages.stream(**LEFT_OUT) as stream:
                    return await stream.get_final_text()

            async def parsed() -> Any:
                return type((await api.chat.completions.parse(**WHO, response_format=Person)).choices[0].message.parsed)

            return [*await asyncio.gather(whole(), chunks(), chat(), responses(), messages(), parsed())]

    assert asyncio.run(run()) == [SUM] * 5 + [Person]


# -- retries --------------------------------------------------------------------------------------


def refuses_twice(server: Scripted) -> None:
    """Two 429s, each with its time to come back, and then the answer."""
    server.says(TEXT)
    answers = server.engine.script

    def script(submission: Any) -> Any:
        count = len(server.engine.submissions)
        return [QueueFullError("full", retry_after=6 + count)] if count <= 2 else answers(submission)

    server.engine.script = script


@pytest.mark.parametrize("stream", [False, True])
def test_a_429_is_retried_when_the_server_says(plain: Scripted, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    refuses_twice(plain)
    answer: Any = plain.openai.with_options(max_retries=2).completions.create(**ASK, stream=stream)
    assert "".join(chunk.choices[0].text for chunk in (answer if stream else [answer])) == TEXT
    assert waits == [7, 8], "Retry-After, not a guess"
    refuses_twice(plain)
    message = plain.anthropic.with_options(max_retries=2).messages.create(**CHAT, max_tokens=50)
    assert message.content[0].text == TEXT
    assert waits[2:] == [7, 8]


def test_a_429_is_retried_by_async_clients(plain: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> list[str]:
        common: Any = {"api_key": "none", "max_retries": 2, "timeout": DEADLINE}
        async with openai.AsyncOpenAI(base_url=f"{plain.url}/v1", **common) as api:
            refuses_twice(plain)
            completion = await api.completions.create(**ASK)
        async with anthropic.AsyncAnthropic(base_url=plain.url, **common) as claude:
            refuses_twice(plain)
            message = await claude.messages.create(**CHAT, max_tokens=50)
        return [completion.choices[0].text, message.content[0].text]

    monkeypatch.setattr(anyio, "sleep", sleep)
    assert asyncio.run(run()) == [TEXT, TEXT]
    assert waits == [7, 8, 7, 8]


def test_a_400_is_not_retried(plain: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(openai.BadRequestError):
        plain.openai.with_options(max_retries=2).completions.create(**ASK, n=0)
