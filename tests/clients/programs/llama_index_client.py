"""LlamaIndex: chats, streams, an agent's tool, objects and embeddings."""

import asyncio
import sys

from checks import check, report
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel

COMMON = {"model": "tiny", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}
CHAT = OpenAILike(**COMMON, is_chat_model=True, is_function_calling_model=True)


class City(BaseModel):
    city: str


def weather(city: str) -> str:
    """Tells the weather."""
    return f"rain in {city}"


@check
def chat():
    return CHAT.chat([ChatMessage("hello")]).message.content


@check
def stream():
    return list(CHAT.stream_chat([ChatMessage("hello")]))[-1].message.content


@check
def complete():
    return OpenAILike(**COMMON, max_tokens=50).complete("hello").text


@check
def responses():
    return OpenAILikeResponses(**COMMON, is_chat_model=True).chat([ChatMessage("hello")]).message.content


@check
def agent():
    async def run():
        return await FunctionAgent(tools=[weather], llm=CHAT, streaming=True).run("weather?")

    return str(asyncio.run(run()))


@check
def object():
    return CHAT.structured_predict(City, PromptTemplate("a city")).city


@check
def embeddings():
    common = {**COMMON, "model_name": COMMON["model"]}
    del common["model"]
    return OpenAILikeEmbedding(**common).get_text_embedding("one")


report()
