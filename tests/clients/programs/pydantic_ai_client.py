"""pydantic-ai: a tool and an object through Chat Completions, Responses and Messages, and a stream."""

import asyncio
import sys

from checks import check, report
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str


OPENAI = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
CHAT = OpenAIChatModel("tiny", provider=OPENAI)
RESPONSES = OpenAIResponsesModel("tiny", provider=OPENAI)
ANTHROPIC = AnthropicModel("tiny", provider=AnthropicProvider(base_url=sys.argv[1], api_key="none"))


def tool_and_object(model):
    agent = Agent(model, output_type=City)
    called = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tells the weather."""
        called.append(city)
        return f"rain in {city}"

    return [agent.run_sync("weather?").output.city, called]


@check
def chat():
    return tool_and_object(CHAT)


@check
def responses():
    return tool_and_object(RESPONSES)


@check
def anthropic():
    return tool_and_object(ANTHROPIC)


@check
def stream():
    async def run():
        async with Agent(CHAT).run_stream("hello") as result:
            return [text async for text in result.stream_text()][-1]

    return asyncio.run(run())


report()
