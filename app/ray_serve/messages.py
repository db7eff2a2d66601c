"""Messages between the front and a replica: a request, and the head of its response."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from tessera.app.routing.prefix_index import Key

CHUNK_BYTES = 512  # of a prompt as JSON that a key stands for
CHUNK_TOKENS = 128  # about as many
MAX_CHUNKS = 1024
PROMPT_FIELDS = ("messages", "prompt", "input")  # of the APIs' requests
BEFORE_PROMPT = ("model", "system", "instructions", "tools", "cache_salt")  # what templates put before the messages
KEY_BYTES = 8


@dataclass(frozen=True)
class HttpRequest:
    """A request as it came; `target` is the path with the query."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def prefix_keys(self) -> list[Key]:
        """Of the prompt's beginning, a chunk each; none where there is no prompt.

        Requests with different API keys share none, as their prefixes are cached apart.
        """
        try:
            fields: Any = orjson.loads(self.body) if self.body else None
        except orjson.JSONDecodeError:
            return []
        if not isinstance(fields, dict):
            return []
        prompt = next((fields[name] for name in PROMPT_FIELDS if fields.get(name)), None)
        if prompt is None:
            return []
        credentials = [value for name, value in self.headers if name in ("authorization", "x-api-key")]
        link = _digest(orjson.dumps([credentials, *(fields.get(name) for name in BEFORE_PROMPT)]))
        text = orjson.dumps(prompt)
        keys = []
        for number in range(min(len(text) // CHUNK_BYTES, MAX_CHUNKS)):
            link = _digest(link + text[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
            keys.append(link[:KEY_BYTES])
        return keys


@dataclass(frozen=True)
class ResponseHead:
    """Status and headers of a response."""

    status: int
    headers: tuple[tuple[str, str], ...]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
