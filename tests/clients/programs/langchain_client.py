"""LangChain: two turns with a tool, an object, streaming, and its error for prompts that are too long."""

import json
import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    city: str


def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


found = {}
for kind, responses in (("chat", False), ("responses", True)):
    model = ChatOpenAI(
        model="tiny", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, use_responses_api=responses
    )
    tools = model.bind_tools([weather])
    history = [HumanMessage("weather?")]
    called = tools.invoke(history)
    call = called.tool_calls[0]
    history += [called, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
    text = "".join(chunk.text for chunk in tools.stream(history))
    city = model.with_structured_output(City).invoke("a city").city
    try:
        model.invoke("x y " * 200000)
    except ContextOverflowError:
        found[kind] = {"text": text, "city": city, "error": "ContextOverflowError"}
print(json.dumps(found))
