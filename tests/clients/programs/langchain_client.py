"""LangChain through four APIs: two turns with a tool, an object, streams, embeddings, prompts that are too long."""

import sys

from checks import check, report
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = sys.argv[1]
OPENAI = {"model": "tiny", "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
CHAT = ChatOpenAI(**OPENAI)
RESPONSES = ChatOpenAI(**OPENAI, use_responses_api=True)
ANTHROPIC = ChatAnthropic(model="tiny", base_url=URL, api_key="none", max_retries=0)
OLLAMA = ChatOllama(model="tiny", base_url=URL)


class City(BaseModel):
    """A city."""

    city: str


def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


def two_turns(model):
    tools = model.bind_tools([weather])
    history = [HumanMessage("weather?")]
    called = tools.invoke(history)
    call = called.tool_calls[0]
    history += [called, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
    return "".join(chunk.text for chunk in tools.stream(history))


def too_long(model):
    try:
        model.invoke("x y " * 200000)
    except ContextOverflowError as error:
        return isinstance(error, ContextOverflowError)


@check
def chat_tools():
    return two_turns(CHAT)


@check
def chat_object():
    return CHAT.with_structured_output(City).invoke("a city").city


@check
def chat_too_long():
    return too_long(CHAT)


@check
def responses_tools():
    return two_turns(RESPONSES)


@check
def responses_object():
    return RESPONSES.with_structured_output(City).invoke("a city").city


@check
def responses_too_long():
    return too_long(RESPONSES)


@check
def anthropic_tools():
    return two_turns(ANTHROPIC)


@check
def anthropic_object():
    return ANTHROPIC.with_structured_output(City, method="json_schema").invoke("a city").city


@check
def anthropic_too_long():
    return too_long(ANTHROPIC)


@check
def ollama_tools():
    return two_turns(OLLAMA)


@check
def ollama_object():
    return OLLAMA.with_structured_output(City).invoke("a city").city


@check
def ollama_reasoning():
    answer = ChatOllama(model="tiny", base_url=URL, reasoning=True).invoke("think")
    return [answer.content, answer.additional_kwargs["reasoning_content"]]


@check
def embeddings():
    made = OpenAIEmbeddings(**OPENAI, check_embedding_ctx_length=False).embed_query("one")
    return [made, OllamaEmbeddings(model="tiny", base_url=URL).embed_query("one")]


report()
