"""Chat Completions over HTTP: the models of a server, and streamed answers."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 3600.0  # seconds without a byte: a long prompt in a long queue takes its time
PROBE_TIMEOUT = 1.0  # seconds


class ServerError(Exception):
    """The server cannot be reached, refuses, or sends something that is no completion; one sentence."""


@dataclass
class Piece:
    """A part of a streamed answer."""

    text: str = ""
    reasoning: str = ""


@dataclass
class Figures:
    """Of one answer. Tokens are those of the server's usage, or else one for each event.

    Attributes:
        first: seconds to the first token; None before it.
        seconds: from first to last token.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first: float | None = None
    seconds: float = 0.0
    finish_reason: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None for fewer than two."""
        return (self.output_tokens - 1) / self.seconds if self.output_tokens > 1 and self.seconds > 0 else None


@dataclass
class ChatServer:
    """A server with an OpenAI API."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
        self._http = httpx.Client(headers=dict(self.headers), timeout=timeout)

    def answers(self) -> bool:
        """Whether something speaks HTTP there."""
        try:
            self._http.get(f"{self.url}/v1/models", timeout=PROBE_TIMEOUT)
        except httpx.HTTPError:
            return False
        return True

    def models(self) -> list[str]:
        """Names. Raises ServerError."""
        try:
            response = self._http.get(f"{self.url}/v1/models")
            _check(response)
            return [str(model["id"]) for model in response.json()["data"]]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self.url}/v1/models is not a list of models") from None

    def stream(
        self, model: str, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any], figures: Figures
    ) -> Generator[Piece, None, None]:
        """The parts of the answer; `figures` is filled meanwhile. Closing the iterator ends the request.

        Raises: ServerError.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": model, "messages": list(messages), **settings, **options}
        sent = time.perf_counter()
        try:
            with self._http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    _check(response)
                for line in response.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    payload = line[5:].strip()
                    if payload == "[DONE]":
                        return
                    piece = _read(payload, figures)
                    if piece.text or piece.reasoning:
                        now = time.perf_counter()
                        if figures.first is None:
                            figures.first = now - sent
                        figures.seconds = now - sent - figures.first
                        yield piece
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def close(self) -> None:
        self._http.close()

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        if isinstance(error, httpx.ConnectError):
            return ServerError(f"there is no server at {self.url}: {error}")
        return ServerError(f"{self.url}: {str(error) or type(error).__name__}")


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = response.text[:300].strip() or response.reason_phrase
    if response.status_code == httpx.codes.UNAUTHORIZED:
        message = f"{message} (give the key with --api-key or OPENAI_API_KEY)"
    raise ServerError(f"{message} [status {response.status_code}]")


def _read(payload: str, figures: Figures) -> Piece:
    """One event. Its `reasoning_content`, or `reasoning` as some servers call it, is told apart from the text."""
    try:
        event = json.loads(payload)
        if "error" in event:
            error = event["error"]
            raise ServerError(str(error["message"] if isinstance(error, dict) else error))
        usage = event.get("usage")
        if usage:
            figures.prompt_tokens = usage.get("prompt_tokens") or 0
            figures.output_tokens = usage.get("completion_tokens") or 0
            figures.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        choices = event.get("choices") or ()
        if not choices:
            return Piece()
        figures.finish_reason = choices[0].get("finish_reason") or figures.finish_reason
        delta = choices[0].get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        piece = Piece(delta.get("content") or "", reasoning if isinstance(reasoning, str) else "")
        if not usage and (piece.text or piece.reasoning):
            figures.output_tokens += 1
        return piece
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ServerError(f"the server sent what is no part of a completion: {payload[:100]!r}") from None
