"""Server-sent events of a streamed answer. What all chunks share is written once, before the first.

The common chunk (some text and nothing else) costs one small JSON string and a concatenation.
"""

from __future__ import annotations

from typing import Any

import orjson

from tessera.app.generate.generation import Delta, Generation
from tessera.app.http.errors import error_object
from tessera.app.openai.objects import AnswerHead, chat_delta, chat_logprobs, completion_logprobs, usage_object
from tessera.app.openai.prompt_logprobs import Echo, echo_logprobs
from tessera.app.text.tokenizer import Tokenizer
from tessera.app.tools.parts import Part
from tessera.engine.contract.errors import RequestError

DONE = b"data: [DONE]\n\n"


def frame(message: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(message)


class _ChunkWriter:
    """Wraps the bytes of a `choices` array's content into a whole frame."""

    def __init__(self, head: dict[str, Any], generation: Generation, *, usage: bool, continuous_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._generation = generation
        self._usage = usage
        self._continuous_usage = continuous_usage
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        tail = b'],"usage":%b}\n\n' % self._usage_json() if self._continuous_usage else self._tail
        return self._head + choice + tail

    def closing(self) -> bytes:
        if not self._usage:
            return DONE
        return b'%b],"usage":%b}\n\n' % (self._head, self._usage_json()) + DONE

    def _usage_json(self) -> bytes:
        return orjson.dumps(usage_object(self._generation.usage()))


class _Frames:
    """What both kinds of stream share."""

    @staticmethod
    def failure(error: RequestError) -> bytes:
        return frame(error_object(error)) + DONE


class ChatFrames(_Frames):
    """Frames of `chat.completion.chunk` objects.

    Args:
        num_logprobs: alternatives per token; None leaves `logprobs` null.
        prompt_token_ids: reported in the first chunk, and each chunk's tokens in it; None reports neither.
    """

    def __init__(
        self,
        head: AnswerHead,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        usage: bool,
        continuous_usage: bool = False,
        num_logprobs: int | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> None:
        fields = head.as_dict("chat.completion.chunk")
        self._writer = _ChunkWriter(fields, generation, usage=usage, continuous_usage=continuous_usage)
        self._num_choices = len(generation.choices)
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._prompt_token_ids = prompt_token_ids
        self._plain = num_logprobs is None and prompt_token_ids is None
        self._starts = [b'{"index":%d,"delta":{"content":' % index for index in range(self._num_choices)]

    def opening(self) -> bytes:
        """Per choice a chunk with the role; the first also with the prompt's tokens, where asked for."""
        frames = []
        for index in range(self._num_choices):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            choice["finish_reason"] = None
            if self._prompt_token_ids is not None:
                choice["prompt_token_ids"] = self._prompt_token_ids
            frames.append(self._writer.chunk(orjson.dumps(choice)))
        return b"".join(frames)

    def delta(self, delta: Delta) -> bytes:
        if delta.finish_reason is None and self._plain and delta.parts is None:
            text = orjson.dumps(delta.text)
            return self._writer.chunk(self._starts[delta.index] + text + b'},"logprobs":null,"finish_reason":null}')
        frames = b""
        if delta.parts is not None:
            frames = self._parts(delta, delta.parts)
        elif delta.text or not self._plain:
            frames = self._writer.chunk(orjson.dumps(self._choice(delta, {"content": delta.text})))
        if delta.finish_reason is not None:
            end = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
            frames += self._writer.chunk(orjson.dumps(end))
        return frames

    def closing(self) -> bytes:
        return self._writer.closing()

    def _parts(self, delta: Delta, parts: list[Part]) -> bytes:
        """A chunk for each part; the first brings the tokens and log-probabilities of all."""
        contents = [chat_delta(part) for part in parts]
        frames = b""
        if not self._plain:
            first = contents.pop(0) if contents else {}
            frames = self._writer.chunk(orjson.dumps(self._choice(delta, first)))
        for content in contents:
            choice = {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}
            frames += self._writer.chunk(orjson.dumps(choice))
        return frames

    def _choice(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = chat_logprobs(delta.entries, self._tokenizer, self._num_logprobs)
        choice: dict[str, Any] = {"index": delta.index, "delta": content, "logprobs": logprobs}
        choice["finish_reason"] = None
        if self._prompt_token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice


class CompletionFrames(_Frames):
    """Frames of streamed `text_completion` objects.

    Args:
        echoes: per choice the prompt to begin with; None without `echo`. With `num_logprobs` its tokens' come too.
        num_logprobs: alternatives per token; None leaves `logprobs` null.
        prompt_token_ids: per choice, reported in its first chunk; None reports no token ids.
    """

    def __init__(
        self,
        head: AnswerHead,
        generation: Generation,
        tokenizer: Tokenizer,
        *,
        usage: bool,
        continuous_usage: bool = False,
        num_logprobs: int | None = None,
        echoes: list[Echo] | None = None,
        prompt_token_ids: list[list[int]] | None = None,
    ) -> None:
        fields = head.as_dict("text_completion")
        self._writer = _ChunkWriter(fields, generation, usage=usage, continuous_usage=continuous_usage)
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._generation = generation
        self._echoes = echoes
        # Their log-probabilities are there only with a choice's first tokens.
        self._opens_late = echoes is not None and num_logprobs is not None
        self._unopened = set(range(len(generation.choices))) if self._opens_late else set[int]()
        self._prompt_token_ids = prompt_token_ids
        self._plain = num_logprobs is None and prompt_token_ids is None
        self._ends = [
            b',"index":%d,"logprobs":null,"finish_reason":null}' % index for index in range(len(generation.choices))
        ]

    def opening(self) -> bytes:
        """The echoed prompts and the prompts' tokens, where asked for; otherwise nothing."""
        if self._opens_late or (self._echoes is None and self._prompt_token_ids is None):
            return b""
        return b"".join(map(self._open, range(len(self._ends))))

    def delta(self, delta: Delta) -> bytes:
        if delta.index in self._unopened:
            self._unopened.discard(delta.index)
            return self._open(delta.index) + self._delta(delta)
        return self._delta(delta)

    def closing(self) -> bytes:
        return self._writer.closing()

    def _open(self, index: int) -> bytes:
        echo = self._echoes[index] if self._echoes is not None else None
        choice = _completion_choice(index, echo.text if echo is not None else "")
        if echo is not None and self._num_logprobs is not None:
            found = self._generation.choices[index].prompt_logprobs
            choice["logprobs"] = echo_logprobs(echo, found, self._tokenizer, self._num_logprobs)
        if self._prompt_token_ids is not None:
            choice["prompt_token_ids"] = self._prompt_token_ids[index]
        return self._writer.chunk(orjson.dumps(choice))

    def _delta(self, delta: Delta) -> bytes:
        if delta.finish_reason is None and self._plain:
            return self._writer.chunk(b'{"text":' + orjson.dumps(delta.text) + self._ends[delta.index])
        frames = b""
        if delta.text or not self._plain:
            frames = self._writer.chunk(orjson.dumps(self._choice(delta)))
        if delta.finish_reason is not None:
            end = _completion_choice(delta.index, "", delta.finish_reason)
            frames += self._writer.chunk(orjson.dumps(end))
        return frames

    def _choice(self, delta: Delta) -> dict[str, Any]:
        choice = _completion_choice(delta.index, delta.text)
        if self._num_logprobs is not None:
            choice["logprobs"] = completion_logprobs(delta.entries, self._tokenizer, self._num_logprobs)
        if self._prompt_token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return choice


def _completion_choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": finish_reason}
