"""The table of operations that the API's description is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tessera.app.anthropic.schema import MessagesPrompt, MessagesRequest
from tessera.app.http.auth import OPEN_PATHS
from tessera.app.openai.completions.schema import CompletionRequest
from tessera.app.openai.embeddings.schema import EmbeddingRequest
from tessera.app.openai.responses.input_items import DEFAULT_LIMIT, MAX_LIMIT, ORDERS
from tessera.app.openai.responses.schema import ResponsesRequest
from tessera.app.openai.tokenize.schema import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from tessera.app.openapi import answers
from tessera.app.schema.chat import ChatCompletionRequest
from tessera.app.schema.common import MAX_NAME

EVENT_STREAM = "text/event-stream"
PLAIN_TEXT = "text/plain"
ANSWERING = (400, 401, 404, 500, 503)  # what an operation without a body may answer besides 200


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path; `bodies` are the forms that its body may have, `query` the schemas of its
    optional query parameters."""

    id: str
    method: str
    path: str
    tag: str
    summary: str
    answer: Any = None
    bodies: tuple[Any, ...] = ()
    examples: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    answer_meaning: str = "The answer."
    other_media_types: tuple[str, ...] = ()
    may_be_unavailable: bool = False

    @property
    def is_open(self) -> bool:
        """Answers without an API key."""
        return self.path in OPEN_PATHS


_HELLO = [{"role": "user", "content": "Hello!"}]
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_WEATHER = {"name": "weather", "description": "Tells the weather of a city.", "parameters": _PARAMETERS}
_WITH_USAGE = {"include_usage": True}
_STREAMED = "The whole answer, or with `stream` its events."

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "createChatCompletion",
        "post",
        "/v1/chat/completions",
        "OpenAI",
        "An answer to a conversation",
        answers.ChatCompletion,
        (ChatCompletionRequest,),
        {
            "plain": {"model": "MODEL", "messages": _HELLO, "max_completion_tokens": 64},
            "streamed": {"model": "MODEL", "messages": _HELLO, "stream": True, "stream_options": _WITH_USAGE},
            "tools": {"model": "MODEL", "messages": _HELLO, "tools": [{"type": "function", "function": _WEATHER}]},
        },
        answer_meaning=_STREAMED,
        other_media_types=(EVENT_STREAM,),
    ),
    Operation(
        "createCompletion",
        "post",
        "/v1/completions",
        "OpenAI",
        "Continuations of texts or token ids",
        answers.TextCompletion,
        (CompletionRequest,),
        {
            "plain": {"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 64},
            "several": {"model": "MODEL", "prompt": ["One", "Two"], "n": 2, "temperature": 0.7, "seed": 1},
        },
        answer_meaning=_STREAMED,
        other_media_types=(EVENT_STREAM,),
    ),
    Operation(
        "createResponse",
        "post",
        "/v1/responses",
        "OpenAI",
        "An answer to items, kept for the next turn",
        answers.ResponseAnswer,
        (ResponsesRequest,),
        {
            "plain": {"model": "MODEL", "input": "Hello!", "instructions": "Be brief."},
            "next turn": {"model": "MODEL", "input": "And then?", "previous_response_id": "resp_0123"},
            "tools": {"model": "MODEL", "input": "Hello!", "tools": [{"type": "function", **_WEATHER}]},
        },
        answer_meaning=_STREAMED,
        other_media_types=(EVENT_STREAM,),
    ),
    Operation(
        "retrieveResponse",
        "get",
        "/v1/responses/{response_id}",
        "OpenAI",
        "A kept answer",
        answers.ResponseAnswer,
        parameters={"response_id": "The `id` of an answer of POST /v1/responses."},
    ),
    Operation(
        "deleteResponse",
        "delete",
        "/v1/responses/{response_id}",
        "OpenAI",
        "Forget a kept answer",
        answers.DeletedResponse,
        parameters={"response_id": "The `id` of an answer of POST /v1/responses."},
    ),
    Operation(
        "listInputItems",
        "get",
        "/v1/responses/{response_id}/input_items",
        "OpenAI",
        "The items that a kept answer was asked with",
        answers.InputItemList,
        parameters={"response_id": "The `id` of an answer of POST /v1/responses."},
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
            "order": {"type": "string", "enum": list(ORDERS), "default": "desc"},
            "after": {"type": "string", "maxLength": MAX_NAME, "description": "The id of the item before the first."},
        },
    ),
    Operation(
        "cancelResponse",
        "post",
        "/v1/responses/{response_id}/cancel",
        "OpenAI",
        "Always refused: answers in the background, which could be cancelled, are not supported",
        answers.ResponseAnswer,
        parameters={"response_id": "The `id` of an answer of POST /v1/responses."},
    ),
    Operation(
        "createEmbeddings",
        "post",
        "/v1/embeddings",
        "OpenAI",
        "Embeddings of texts or token ids",
        answers.EmbeddingList,
        (EmbeddingRequest,),
        {"plain": {"model": "MODEL", "input": ["One", "Two"]}},
    ),
    Operation("listModels", "get", "/v1/models", "OpenAI", "The models that are served", answers.ModelList),
    Operation(
        "retrieveModel",
        "get",
        "/v1/models/{name}",
        "OpenAI",
        "One model",
        answers.Model,
        parameters={"name": "A name of /v1/models; it may have slashes."},
    ),
    Operation(
        "createMessage",
        "post",
        "/v1/messages",
        "Anthropic",
        "An answer to a conversation, in Anthropic's form",
        answers.MessageAnswer,
        (MessagesRequest,),
        {
            "plain": {"model": "MODEL", "max_tokens": 64, "messages": _HELLO},
            "tools": {
                "model": "MODEL",
                "max_tokens": 64,
                "messages": _HELLO,
                "tools": [{"name": "weather", "input_schema": _PARAMETERS}],
            },
        },
        answer_meaning=_STREAMED,
        other_media_types=(EVENT_STREAM,),
    ),
    Operation(
        "countTokens",
        "post",
        "/v1/messages/count_tokens",
        "Anthropic",
        "How many tokens a conversation has",
        answers.TokenCount,
        (MessagesPrompt,),
        {"plain": {"model": "MODEL", "messages": _HELLO}},
    ),
    Operation(
        "tokenize",
        "post",
        "/tokenize",
        "Tokens",
        "The token ids of a text, or of a conversation through the chat template",
        answers.TokenList,
        (TokenizeTextRequest, TokenizeChatRequest),
        {"text": {"prompt": "Hello!"}, "conversation": {"messages": _HELLO, "return_token_strs": True}},
    ),
    Operation(
        "detokenize",
        "post",
        "/detokenize",
        "Tokens",
        "The text of token ids",
        answers.DetokenizedText,
        (DetokenizeRequest,),
        {"plain": {"tokens": [5, 6, 7]}},
    ),
    Operation(
        "health",
        "get",
        "/health",
        "Operation",
        "Whether the engine gets on with its work",
        answers.Health,
        may_be_unavailable=True,
    ),
    Operation(
        "ready",
        "get",
        "/ready",
        "Operation",
        "Whether requests are taken",
        answers.Readiness,
        may_be_unavailable=True,
    ),
    Operation("version", "get", "/version", "Operation", "The server's version", answers.Version),
    Operation(
        "metrics",
        "get",
        "/metrics",
        "Operation",
        "Metrics in Prometheus' text format",
        other_media_types=(PLAIN_TEXT,),
    ),
)
