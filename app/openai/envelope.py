"""The envelope of chat and text completions: fields that all chunks of a stream and the whole object share.

The shared bytes are written once, before the first chunk. The common chunk (some text and nothing else) then costs one
small JSON string and a concatenation.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from tessera import __version__
from tessera.app.generate.generation import Delta, Generation, Usage
from tessera.app.http.dialect import error_object
from tessera.app.http.json_pieces import json_in_pieces
from tessera.engine.contract.errors import RequestError
from tessera.engine.contract.messages import EngineInfo

DONE = b"data: [DONE]\n\n"
MANY_ENTRIES = 256  # of log-probabilities in one chunk


@dataclass(slots=True)
class CompletionHead:
    """The fields that all chunks of a completion, and the completion as a whole, have in common."""

    id: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, model: str, info: EngineInfo) -> CompletionHead:
        return cls(f"{prefix}-{secrets.token_hex(16)}", model, system_fingerprint(info))

    def as_dict(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "service_tier": None,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(slots=True, frozen=True)
class ChunkOptions:
    """Reports of a stream's chunks besides the text.

    Attributes:
        usage: a last chunk with the usage.
        continuous_usage: the usage so far in every chunk.
        num_logprobs: alternatives per token; None leaves `logprobs` null.
        names_ids: tokens are called by their ids.
    """

    usage: bool = False
    continuous_usage: bool = False
    num_logprobs: int | None = None
    names_ids: bool = False


class ChunkWriter:
    """Wraps the bytes of one choice into an event with a whole chunk."""

    def __init__(self, head: dict[str, Any], generation: Generation, options: ChunkOptions) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._generation = generation
        self._usage = options.usage
        self._continuous_usage = options.continuous_usage
        self._tail = b'],"usage":null}\n\n' if options.usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        tail = b'],"usage":%b}\n\n' % self._usage_json() if self._continuous_usage else self._tail
        return self._head + choice + tail

    def chunk_with(self, choice: bytes, name: str, value: object) -> bytes:
        """A chunk with one more field beside `choices`."""
        field = b',"%b":%b' % (name.encode(), orjson.dumps(value))
        return self.chunk(choice)[:-3] + field + b"}\n\n"

    def closing(self) -> bytes:
        if not self._usage:
            return DONE
        return b'%b],"usage":%b}\n\n' % (self._head, self._usage_json()) + DONE

    @staticmethod
    def failure(error: RequestError) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(error_object(error)) + DONE

    def _usage_json(self) -> bytes:
        return orjson.dumps(usage_object(self._generation.usage()))


def system_fingerprint(info: EngineInfo) -> str:
    """Changes when equal seeds may give other tokens: with the program, the model's numbers or the device."""
    numbers = f"{info.num_parameters}|{info.dtype}|{info.weight_bytes}|{'|'.join(sorted(info.stored_bytes))}"
    return _fingerprint(f"{__version__}|{info.architecture}|{numbers}|{info.device_name}")


@lru_cache
def _fingerprint(facts: str) -> str:
    return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:10]}"


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.num_reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.num_accepted_draft_tokens,
            "rejected_prediction_tokens": usage.num_rejected_draft_tokens,
        },
    }


def choice_json(choice: dict[str, Any], delta: Delta) -> bytes:
    """The choice of a delta's chunk; a client that reads slowly gets thousands of log-probabilities in one."""
    return json_in_pieces(choice) if len(delta.entries) > MANY_ENTRIES else orjson.dumps(choice)
