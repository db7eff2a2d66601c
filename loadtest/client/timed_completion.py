"""A streamed completion: its events with their times of arrival."""

from __future__ import annotations

from array import array
from time import perf_counter
from typing import Any

import orjson

from tessera.loadtest.client.records import UNKNOWN

_WRONG_SHAPE = (AttributeError, IndexError, KeyError, TypeError)


class TimedCompletion:
    """One completion, filled as it arrives.

    Attributes:
        token_times: `time.perf_counter()` of each event with a token or more.
        input_tokens, output_tokens: as the server's usage says; without usage, one token an event.
        cached_tokens: of the prompt, as the server's usage says; -1 where it does not.
        finished: whether [DONE] came.
        error, message: kind of failure and its text; None without.
    """

    __slots__ = (
        *("_output_tokens", "_rest", "_text", "cached_tokens", "error", "finished", "input_tokens", "message"),
        "token_times",
    )

    def __init__(self, *, keep_text: bool = False) -> None:
        self.token_times = array("d")
        self.input_tokens = 0
        self.cached_tokens = UNKNOWN
        self.finished = False
        self.error: str | None = None
        self.message = ""
        self._output_tokens: int | None = None
        self._rest = b""
        self._text: list[str] | None = [] if keep_text else None

    @property
    def output_tokens(self) -> int:
        return len(self.token_times) if self._output_tokens is None else self._output_tokens

    @property
    def text(self) -> str:
        """The visible text, kept only with `keep_text`."""
        return "".join(self._text or ())

    def receive(self, data: bytes) -> None:
        """Read the next bytes of a server-sent event stream."""
        now = perf_counter()
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    self._event(line[5:], now)
                except _WRONG_SHAPE:
                    self.fail("malformed answer", line[:200].decode(errors="replace"))

    def read_whole(self, body: bytes) -> None:
        """Read a completion that was not streamed."""
        try:
            message = self._decode(body)
            if message is not None:
                self._take_usage(message)
                if "choices" in message or "data" not in message:  # data: embeddings
                    self._take_text(message["choices"][0], "message")
        except _WRONG_SHAPE:
            self.fail("malformed answer", body[:200].decode(errors="replace"))

    def _event(self, payload: bytes, now: float) -> None:
        if payload.strip() == b"[DONE]":
            self.finished = True
            return
        event = self._decode(payload)
        if event is None:
            return
        self._take_usage(event)
        choices = event.get("choices")
        if choices:
            if _has_token(choices[0]):
                self.token_times.append(now)
            self._take_text(choices[0], "delta")

    def _take_text(self, choice: dict[str, Any], name: str) -> None:
        if self._text is not None:
            self._text.append(choice.get("text") or choice.get(name, {}).get("content") or "")

    def _decode(self, payload: bytes) -> dict[str, Any] | None:
        try:
            message = orjson.loads(payload)
        except orjson.JSONDecodeError:
            message = None
        if not isinstance(message, dict):
            self.fail("malformed answer", payload[:200].decode(errors="replace"))
            return None
        if "error" in message:
            error = message["error"] if isinstance(message["error"], dict) else {"message": message["error"]}
            self.fail(f"error event: {error.get('type') or 'unknown'}", str(error.get("message")))
            return None
        return message

    def _take_usage(self, message: dict[str, Any]) -> None:
        usage = message.get("usage")
        if usage:
            self.input_tokens = usage.get("prompt_tokens", 0)
            self._output_tokens = usage.get("completion_tokens", 0)
            details = usage.get("prompt_tokens_details")
            if details:
                self.cached_tokens = details.get("cached_tokens") or 0

    def fail(self, kind: str, message: str) -> None:
        """Record a failure; the first one counts."""
        if self.error is None:
            self.error, self.message = kind, message


def _has_token(choice: dict[str, Any]) -> bool:
    """False for a chat's first event, which only names the role, and a last one that only has the finish_reason.

    An event with empty text may stand for a token: half of a character, for example.
    """
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    if any(value for name, value in delta.items() if name != "role"):
        return True
    return "role" not in delta and choice.get("finish_reason") is None
