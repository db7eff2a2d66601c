"""pydantic-ai: a tool and an object, through Chat Completions and through Responses."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    city: str


provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
found = {}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(kind("tiny", provider=provider), output_type=City)

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tells the weather."""
        return f"rain in {city}"

    found[kind.__name__] = agent.run_sync("a city").output.city
print(json.dumps(found))
