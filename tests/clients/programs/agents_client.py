"""OpenAI's agents SDK: two turns with a tool, an object and streams, through Responses and Chat Completions."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import check, report
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class City(BaseModel):
    city: str


@function_tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


def model(kind):
    """With a client of its own, as each check has its event loop."""
    return kind("tiny", openai_client=AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0))


def two_turns(kind):
    agent = Agent(name="a", instructions="be brief", tools=[weather], model=model(kind))
    first = Runner.run_sync(agent, "weather?")
    second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "hello"}])
    return [first.final_output, second.final_output]


def city(kind):
    return Runner.run_sync(Agent(name="a", model=model(kind), output_type=City), "a city").final_output.city


def streamed(kind):
    async def run():
        result = Runner.run_streamed(Agent(name="a", model=model(kind)), "hello")
        return len([event async for event in result.stream_events()]) > 2, result.final_output

    return list(asyncio.run(run()))


@check
def responses_tools():
    return two_turns(OpenAIResponsesModel)


@check
def responses_object():
    return city(OpenAIResponsesModel)


@check
def responses_stream():
    return streamed(OpenAIResponsesModel)


@check
def chat_tools():
    return two_turns(OpenAIChatCompletionsModel)


@check
def chat_object():
    return city(OpenAIChatCompletionsModel)


@check
def chat_stream():
    return streamed(OpenAIChatCompletionsModel)


report()
