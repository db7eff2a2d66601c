"""OpenAI's agents SDK: a tool, through Responses and through Chat Completions."""

import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)


@function_tool
def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


found = {}
for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    agent = Agent(name="a", instructions="be brief", tools=[weather], model=kind("tiny", openai_client=client))
    first = Runner.run_sync(agent, "weather?")
    second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "and tomorrow?"}])
    found[kind.__name__] = [first.final_output, second.final_output]
print(json.dumps(found))
