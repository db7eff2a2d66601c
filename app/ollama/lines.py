"""The lines of JSON of a streamed answer, and the whole answer where it is not streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import orjson

from tessera.app.generate.completion import Completion
from tessera.app.generate.generation import Delta, FinishReason, Generation
from tessera.app.ollama.errors import ollama_error_object
from tessera.app.openai.logprobs import chat_logprobs
from tessera.app.text.tokenizer import Tokenizer
from tessera.app.tools.parts import CallArguments, CallStart, Content, Part, Reasoning
from tessera.engine.contract.errors import RequestError

NDJSON = "application/x-ndjson"
SECOND = 10**9  # nanoseconds


@dataclass(slots=True)
class AnswerHead:
    """Shared by all lines of a response.

    Attributes:
        model: its name as the request has it.
        arrival, submitted: `time.monotonic()` of the request's first byte, and of its way to the engine.
        num_logprobs: alternatives per token; None reports no log-probabilities.
    """

    model: str
    arrival: float
    submitted: float
    tokenizer: Tokenizer
    num_logprobs: int | None


@dataclass(slots=True)
class Shown:
    """The content of a line."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[Mapping[str, Any]] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls)


class CallReader:
    """Tool calls from a completion's parts, each given out once it is whole; one that is cut is left out.

    Ollama's arguments are an object, so those that are none are shown as the model wrote them, in the content.
    """

    def __init__(self) -> None:
        self._open: CallStart | None = None
        self._arguments: list[str] = []

    def read_parts(self, parts: Sequence[Part]) -> Shown:
        content, thinking = [], []
        calls: list[Mapping[str, Any]] = []
        for part in parts:
            if isinstance(part, CallArguments):
                self._arguments.append(part.text)
                continue
            ended = self.finish()
            content.append(ended.content)
            calls += ended.calls
            if isinstance(part, CallStart):
                self._open = part
            elif isinstance(part, Content):
                content.append(part.text)
            elif isinstance(part, Reasoning):
                thinking.append(part.text)
        return Shown("".join(content), "".join(thinking), calls)

    def finish(self, *, cut: bool = False) -> Shown:
        """The call that is open."""
        start, text = self._open, "".join(self._arguments)
        self._open, self._arguments = None, []
        if start is None:
            return Shown()
        try:
            arguments = orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            return Shown() if cut else Shown(content=text)
        function = {"index": start.index, "name": start.name, "arguments": arguments}
        return Shown(calls=[{"id": start.id, "function": function}])


class AnswerLines(ABC):
    """The lines of one answer; the last has counts and times.

    Attributes:
        generation: the answer's.
    """

    def __init__(self, head: AnswerHead, generation: Generation) -> None:
        self._head = head
        self.generation = generation
        self._calls = CallReader()
        self._finish_reason: FinishReason | None = None

    @abstractmethod
    def shown_fields(self, shown: Shown) -> dict[str, Any]:
        """The fields of a line that have its text."""

    def closing_fields(self) -> dict[str, Any]:
        """Fields of the last line alone, beside counts and times."""
        return {}

    @property
    def keepalive(self) -> bytes:
        """A line without text, because clients take every line for an object."""
        return self._line(Shown())

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return self._delta_line(delta, self._read(delta))

    def closing(self) -> bytes:
        return orjson.dumps(self._last(self._end())) + b"\n"

    def failure(self, error: RequestError) -> bytes:
        return orjson.dumps(ollama_error_object(error)) + b"\n"

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The finished answer where it is not streamed."""
        delta = completion.as_delta()
        shown, end = self._read(delta), self._end()
        shown.content += end.content
        shown.calls = [*shown.calls, *end.calls]
        return {**self._last(shown), **self._logprobs(delta)}

    def _read(self, delta: Delta) -> Shown:
        self._finish_reason = delta.finish_reason
        return self._calls.read_parts(delta.as_parts())

    def _end(self) -> Shown:
        return self._calls.finish(cut=self._finish_reason == "length")

    def _delta_line(self, delta: Delta, shown: Shown) -> bytes:
        logprobs = self._logprobs(delta)
        return self._line(shown, **logprobs) if shown or logprobs else b""

    def _line(self, shown: Shown, **fields: Any) -> bytes:
        return orjson.dumps({**self._stamp(), **self.shown_fields(shown), "done": False, **fields}) + b"\n"

    def _last(self, shown: Shown) -> dict[str, Any]:
        return {
            **self._stamp(),
            **self.shown_fields(shown),
            "done": True,
            "done_reason": "length" if self._finish_reason == "length" else "stop",
            **self.closing_fields(),
            **statistics(self._head, self.generation),
        }

    def _stamp(self) -> dict[str, Any]:
        return {"model": self._head.model, "created_at": timestamp()}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        head = self._head
        if head.num_logprobs is None or not delta.entries:
            return {}
        return {"logprobs": chat_logprobs(delta.entries, head.tokenizer, head.num_logprobs)["content"]}


class ChatLines(AnswerLines):
    """Of /api/chat."""

    def shown_fields(self, shown: Shown) -> dict[str, Any]:
        return {"message": message(shown)}


class GenerateLines(AnswerLines):
    """Of /api/generate."""

    def __init__(self, head: AnswerHead, generation: Generation, prompt_token_ids: list[int] | None) -> None:
        """`prompt_token_ids`: the beginning of the `context` that is returned; None returns none."""
        super().__init__(head, generation)
        self._context = None if prompt_token_ids is None else list(prompt_token_ids)

    def delta(self, delta: Delta) -> bytes:
        if self._context is not None:
            self._context += delta.token_ids
        return super().delta(delta)

    def whole(self, completion: Completion) -> dict[str, Any]:
        if self._context is not None:
            self._context += completion.token_ids
        return super().whole(completion)

    def shown_fields(self, shown: Shown) -> dict[str, Any]:
        fields = {"response": shown.content}
        return fields | {"thinking": shown.thinking} if shown.thinking else fields

    def closing_fields(self) -> dict[str, Any]:
        return {} if self._context is None else {"context": self._context}


def message(shown: Shown) -> dict[str, Any]:
    """The message of a line of /api/chat."""
    fields: dict[str, Any] = {"role": "assistant", "content": shown.content}
    if shown.thinking:
        fields["thinking"] = shown.thinking
    if shown.calls:
        fields["tool_calls"] = list(shown.calls)
    return fields


def load_answer(model: str, *, unloads: bool, **shown: Any) -> dict[str, Any]:
    """The answer to a request without a prompt, which loads the model, or unloads it with a keep_alive of 0."""
    reason = "unload" if unloads else "load"
    return {"model": model, "created_at": timestamp(), **shown, "done": True, "done_reason": reason}


def statistics(head: AnswerHead, generation: Generation) -> dict[str, int]:
    """Counts of tokens, and times in nanoseconds.

    `load_duration` ends with the first step of the engine: the time for reading the request, the chat template and
    the queue. `prompt_eval_duration` ends with the first token, `eval_duration` with the last.
    """
    usage, timing = generation.usage(), generation.timing()
    first, last = timing.first_token_at, max(choice.last_token_at for choice in generation.choices)
    begun = head.submitted + (timing.queue_time or 0.0)
    return {
        "total_duration": nanoseconds(time.monotonic() - head.arrival),
        "load_duration": nanoseconds(begun - head.arrival),
        "prompt_eval_count": usage.num_prompt_tokens,
        "prompt_eval_duration": nanoseconds(first - begun if first is not None else 0.0),
        "eval_count": usage.num_completion_tokens,
        "eval_duration": nanoseconds(last - first if first is not None else 0.0),
    }


def nanoseconds(seconds: float) -> int:
    """At least one, because clients divide by it."""
    return max(1, round(seconds * SECOND))


def timestamp() -> str:
    """Now, as Go writes times."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
