"""Models of what /invocations returns, for /openapi.json."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, RootModel

from tessera.app.http.dialect import ErrorObject
from tessera.app.openai.chat.objects import ChatCompletionChunk, ChatCompletionObject
from tessera.app.openai.completions.objects import TextCompletionChunk, TextCompletionObject
from tessera.app.openai.embeddings.objects import EmbeddingList
from tessera.app.openai.rerank.objects import RerankList


class InvocationObject(RootModel[Any]):
    """The object of the API that the body belongs to."""

    model_config = ConfigDict(defer_build=True)
    root: ChatCompletionObject | TextCompletionObject | EmbeddingList | RerankList


class InvocationEvent(RootModel[Any]):
    """The data of an event: a chunk, or the error that ends the stream."""

    model_config = ConfigDict(defer_build=True)
    root: ChatCompletionChunk | TextCompletionChunk | ErrorObject
