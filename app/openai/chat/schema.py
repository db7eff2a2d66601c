"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tessera.app.schema.chat import ChatRequest
from tessera.app.schema.examples import HELLO, WEATHER_FUNCTION
from tessera.app.schema.fields import Metadata
from tessera.app.schema.generation_fields import GenerationRequest


class ChatCompletionRequest(ChatRequest):
    """A conversation, `n` completions of it."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.refused,
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "store": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    examples: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "plain": {"model": "MODEL", "messages": HELLO, "max_completion_tokens": 64},
        "streamed": {"model": "MODEL", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}},
        "tools": {"model": "MODEL", "messages": HELLO, "tools": [{"type": "function", "function": WEATHER_FUNCTION}]},
    }

    metadata: Metadata | None = None
