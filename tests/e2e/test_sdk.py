"""The official openai SDK against a served model: its clients parse every answer and raise every error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.servers.server_fixture import DEADLINE, Server

MESSAGES: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Tell the time."}]
RENDERED = (
    "<|im_start|>developer\nBe brief.<|im_end|>\n<|im_start|>user\nTell the time.<|im_end|>\n<|im_start|>assistant\n"
)
FIELDS: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def sdk(tiny_server: Server) -> Iterator[openai.OpenAI]:
    base_url = tiny_server.url + "/v1"
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=DEADLINE) as client:
        yield client


@pytest.fixture(scope="module")
def expected(tiny_server: Server) -> str:
    """What the model says to MESSAGES, asked for without a chat template."""
    return tiny_server.complete(RENDERED.replace("developer", "system"), 12).text


def test_chat(sdk: openai.OpenAI, tiny_server: Server, expected: str) -> None:
    answer = sdk.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, **FIELDS)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", expected, None)
    assert choice.finish_reason == "length"
    assert "".join(entry.token for entry in choice.logprobs.content) == expected
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_streamed_chat(sdk: openai.OpenAI, expected: str) -> None:
    stream = sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **FIELDS
    )
    chunks = list(stream)
    *told, last, usage = chunks
    assert told[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == expected
    assert (last.choices[0].finish_reason, usage.choices) == ("length", [])
    assert usage.usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions(sdk: openai.OpenAI, tiny_server: Server) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    expected = [tiny_server.complete(prompt, 12).text for prompt in prompts]
    answer = sdk.completions.create(model="tiny", prompt=prompts, **FIELDS)
    assert [choice.text for choice in answer.choices] == expected
    texts = ["", ""]
    for chunk in sdk.completions.create(model="tiny", prompt=prompts, stream=True, **FIELDS):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_async(tiny_server: Server, expected: str) -> None:
    """Many at once through one client: chat and completions, streamed and whole."""
    told = tiny_server.complete([5, 6, 7], 12).text

    async def streamed_chat(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **FIELDS)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def whole_chat(client: openai.AsyncOpenAI) -> str:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, **FIELDS)
        return answer.choices[0].message.content or ""

    async def streamed_completion(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(model="tiny", prompt=[5, 6, 7], stream=True, **FIELDS)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def whole_completion(client: openai.AsyncOpenAI) -> str:
        return (await client.completions.create(model="tiny", prompt=[5, 6, 7], **FIELDS)).choices[0].text

    async def run() -> list[str]:
        base_url = tiny_server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=DEADLINE) as client:
            kinds = (streamed_chat, whole_chat, streamed_completion, whole_completion)
            return await asyncio.gather(*(kind(client) for _ in range(3) for kind in kinds))

    assert asyncio.run(run()) == [expected, expected, told, told] * 3
