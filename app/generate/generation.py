"""Generations: the engine's outputs become text, one `Choice` per sequence, one `Generation` per request."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tessera.app.generate.reader import CompletionReader
from tessera.app.http.access_log import milliseconds
from tessera.app.limits.lease import SequenceHold
from tessera.app.text.detokenizer import Detokenizer
from tessera.app.text.stop_strings import StopMatcher
from tessera.app.tools.parts import Content, Part
from tessera.engine.contract.errors import EngineUnavailableError
from tessera.engine.contract.messages import PromptScores, RequestOutput, TokenLogprobs, rows_of
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.ipc.request_stream import RequestStream

FinishReason = Literal["stop", "length", "tool_calls"]
CHOICES_AT_A_TIME = 64  # that are first waited for in one turn of the event loop, in about two milliseconds


@dataclass(slots=True)
class TokenEntry:
    """A token with its logprobs; `text_offset` is where its text begins, in characters of the choice's text."""

    logprobs: TokenLogprobs
    text_offset: int


@dataclass(slots=True)
class Delta:
    """New text of one choice that is final, with its tokens and log-probabilities.

    `parts` is the text as a reader understood it; None where the choice has no reader.
    """

    index: int
    text: str
    token_ids: list[int]
    entries: list[TokenEntry]
    finish_reason: FinishReason | None
    parts: list[Part] | None = None

    def as_parts(self) -> list[Part]:
        """The parts; without a reader all of the text is content."""
        if self.parts is not None:
            return self.parts
        return [Content(self.text)] if self.text else []


@dataclass(slots=True)
class TextOptions:
    """Options for turning tokens into text; with `scores_only` the completion stays empty."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    wants_logprobs: bool = False
    scores_only: bool = False


@dataclass(slots=True)
class Usage:
    """Token counts of a request, as the usage object reports them."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_rejected_draft_tokens: int = 0


@dataclass(slots=True)
class Timing:
    """Times of a request's tokens.

    Attributes:
        queue_time: seconds from arrival at the engine to the first step, of the choice that came first.
        first_token_at: `time.monotonic()` of the first token of all choices.
        time_per_output_token: mean seconds between two tokens of a choice.
    """

    queue_time: float | None
    first_token_at: float | None
    time_per_output_token: float | None


class Choice:
    """The text of one sequence as it grows.

    Attributes:
        num_tokens: tokens generated, up to and with the one that ended the text.
        num_reasoning_tokens: those of them that are reasoning.
        num_accepted_draft_tokens, num_rejected_draft_tokens: that were drafted.
        finish_reason: set once the text is complete, by the engine or by a stop string.
        prompt_logprobs: of the prompt's tokens but the first, if asked for; set by the first output.
        queue_time: seconds from arrival at the engine to the first step; set by the first output.
        prefill_time: seconds from there to the first token; set by the first output.
        decode_time: seconds from there to the last token; set by the engine's last output.
        first_token_at, last_token_at: `time.monotonic()` of the first and of the newest output.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        options: TextOptions,
        *,
        text_offset: int = 0,
        reader: CompletionReader | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_accepted_draft_tokens = 0
        self.num_rejected_draft_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[PromptScores] = []
        self.queue_time: float | None = None
        self.prefill_time: float | None = None
        self.decode_time: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        self._detokenizer = detokenizer
        self._options = options
        self._matcher = StopMatcher(options.stops, include_stop=options.include_stop) if options.stops else None
        self._reader = reader
        self._by_token = bool(options.stops) or options.wants_logprobs or reader is not None
        self._num_chars = text_offset  # of all text so far, held back or not
        self._num_shown = text_offset
        self._token_ids: list[int] = []
        self._entries: list[TokenEntry] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.found if self._matcher is not None else None

    def advance(self, output: RequestOutput) -> Delta | None:
        """The delta of one engine output; None while no character became whole.

        Raises:
            EngineUnavailableError: the engine gave the sequence up.
        """
        reason = output.finish_reason
        if reason == "abort" or reason == "error":  # errors are raised by the stream itself
            raise EngineUnavailableError("The engine gave this request up before its end.")
        self._note_output(output)
        if self._options.scores_only:
            self.finish_reason = "length"
            return Delta(self.index, "", [], [], "length")
        token_ids = output.token_ids
        hidden = reason == "stop" and not self._options.include_stop and token_ids[-1:] == [output.stop_token_id]
        text = self._text_by_token(output, hidden) if self._by_token else self._text_at_once(token_ids, hidden)
        if reason is not None:
            text += self._rest()
        if self._by_token and self._ended_by_text:
            self.finish_reason = "stop"
        elif reason is not None:
            self.finish_reason = reason
        self._num_shown += len(text)
        parts = self._read_parts() if self._reader is not None else None
        if self.finish_reason is None and not (text if parts is None else parts):
            return None
        shown_ids, self._token_ids = self._token_ids, []
        return Delta(self.index, text, shown_ids, self._release_entries(), self.reported_reason, parts)

    @property
    def reported_reason(self) -> FinishReason | None:
        """The finish reason as responses report it, `tool_calls` included."""
        if self.finish_reason == "stop" and self._reader is not None and self._reader.ends_with_calls:
            return "tool_calls"
        return self.finish_reason

    def _note_output(self, output: RequestOutput) -> None:
        self.last_token_at = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at
            self.queue_time, self.prefill_time = output.queue_time, output.prefill_time
        self.decode_time = output.decode_time
        self.num_accepted_draft_tokens = output.num_accepted_draft_tokens
        self.num_rejected_draft_tokens = output.num_rejected_draft_tokens
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs

    @property
    def _stopped(self) -> bool:
        return self._matcher is not None and self._matcher.stopped

    @property
    def _ended_by_text(self) -> bool:
        return self._stopped or (self._reader is not None and self._reader.complete)

    def _read_parts(self) -> list[Part]:
        assert self._reader is not None
        if self.finish_reason is not None:
            self._reader.finish(cut=self.finish_reason == "length")
        return self._reader.take_parts()

    def _text_at_once(self, token_ids: list[int], hidden: bool) -> str:
        """New text where nothing depends on single tokens; `hidden` leaves out the last one."""
        self.num_tokens += len(token_ids)
        self._token_ids += token_ids
        return self._detokenizer.decode_tokens(token_ids[:-1] if hidden else token_ids)

    def _text_by_token(self, output: RequestOutput, hidden: bool) -> str:
        """New text token by token, up to the one that ends it."""
        shown = ""
        num_visible = len(output.token_ids) - hidden
        for position, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            self._token_ids.append(token_id)
            if position >= num_visible:
                break
            if output.logprobs is not None:
                self._entries.append(TokenEntry(output.logprobs[position], self._num_chars))
            text = self._before_stop(self._detokenizer.decode_tokens([token_id]))
            shown += text
            if self._reader is not None:
                was_in_reasoning = self._reader.in_reasoning
                self._reader.read_text(text)
                self.num_reasoning_tokens += was_in_reasoning or self._reader.in_reasoning
            if self._ended_by_text:
                break
        return shown

    def _rest(self) -> str:
        """Text that was held back, now that the sequence has ended."""
        if self._stopped:
            return ""
        rest = self._before_stop(self._detokenizer.flush())
        if self._matcher is not None:
            rest += self._matcher.flush()
        if self._reader is not None:
            self._reader.read_text(rest)
        return rest

    def _before_stop(self, text: str) -> str:
        """The part of new text that may be shown; stop strings are matched after the first `min_tokens` tokens."""
        self._num_chars += len(text)
        matcher = self._matcher
        if matcher is None or matcher.stopped or self.num_tokens <= self._options.min_tokens:
            return text
        return matcher.match_text(text)

    def _release_entries(self) -> list[TokenEntry]:
        """The entries whose text is shown; those of a stop string are dropped with its text."""
        matcher = self._matcher
        if matcher is None or not (matcher.holding or matcher.stopped):
            released, self._entries = self._entries, []
            return released
        released = [entry for entry in self._entries if entry.text_offset < self._num_shown]
        self._entries = [] if matcher.stopped else self._entries[len(released) :]
        return released


@dataclass(slots=True)
class Generation:
    """All sequences of one request. `choices[i]` reads `streams[i]`.

    Attributes:
        num_prompt_tokens: counts each prompt once, however many choices it has.
        hold: on the limits of the request's key.
        params: of the first sequence.
        submitted: `time.monotonic()` of its way to the engine.
    """

    choices: Sequence[Choice]
    streams: Sequence[RequestStream]
    num_prompt_tokens: int
    choices_per_prompt: int = 1
    hold: SequenceHold | None = None
    params: SamplingParams | None = None
    submitted: float = 0.0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)  # choices of which a delta has been counted

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=sum(choice.num_cached_tokens for choice in self.choices[:: self.choices_per_prompt]),
            num_completion_tokens=sum(choice.num_tokens for choice in self.choices),
            num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
            num_accepted_draft_tokens=sum(choice.num_accepted_draft_tokens for choice in self.choices),
            num_rejected_draft_tokens=sum(choice.num_rejected_draft_tokens for choice in self.choices),
        )

    def timing(self) -> Timing:
        """The times so far."""
        begun = [(choice.first_token_at, choice) for choice in self.choices if choice.first_token_at is not None]
        if not begun:
            return Timing(None, None, None)
        first_token_at, first = min(begun, key=lambda pair: pair[0])
        num_gaps = sum(choice.num_tokens - 1 for _, choice in begun if choice.num_tokens)
        seconds = sum(choice.last_token_at - at for at, choice in begun)
        return Timing(first.queue_time, first_token_at, seconds / num_gaps if num_gaps else None)

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """The log-probabilities of choice `index`'s prompt, which the prompt's first choice holds."""
        return rows_of(self.choices[index - index % self.choices_per_prompt].prompt_logprobs)

    def account(self, arrival: float) -> dict[str, Any]:
        """Fields of the access log: tokens, times in milliseconds, finish reasons."""
        usage, timing = self.usage(), self.timing()
        reasons = {choice.reported_reason or "abort" for choice in self.choices}
        return {
            "prompt_tokens": usage.num_prompt_tokens,
            "cached_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_completion_tokens,
            "choices": len(self.choices) if len(self.choices) > 1 else None,
            "queue_ms": milliseconds(timing.queue_time),
            "ttft_ms": milliseconds(timing.first_token_at - arrival if timing.first_token_at is not None else None),
            "tpot_ms": milliseconds(timing.time_per_output_token),
            "finish_reason": "+".join(sorted(reasons)),
        }

    async def wait_accepted(self, seconds: float = math.inf) -> None:
        """Wait until the engine has taken all sequences, for at most `seconds`.

        Raises:
            RequestError: the engine has refused one.
        """
        deadline = time.monotonic() + seconds
        for stream in self.streams:
            await stream.wait_accepted(deadline - time.monotonic())

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all choices in order of arrival. The caller closes it, and calls `abort` in the end.

        Raises (the iteration): RequestError: the engine failed one of the sequences.
        """
        return self._merged() if len(self.choices) > 1 else _follow(self.choices[0], self.streams[0])

    @property
    def num_values(self) -> Callable[[Delta], int] | None:
        """Counts what a delta lists; None where no log-probabilities are asked for: most deltas are a word of text."""
        params = self.params
        asked = params is None or params.logprobs is not None or params.prompt_logprobs is not None
        return self._num_values if asked else None

    def _num_values(self, delta: Delta) -> int:
        """Tokens and log-probabilities of a delta, thousands for a client that reads slowly, and of the prompt with a
        choice's first delta."""
        total = len(delta.token_ids) + values_of_entries(delta.entries)
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            first = self.choices[delta.index - delta.index % self.choices_per_prompt]
            total += values_of_scores(first.prompt_logprobs)
        return total

    async def abort(self) -> None:
        """Stop every sequence that has not ended; does nothing when all have."""
        if self.hold is not None:
            self.hold.release(sum(choice.num_tokens for choice in self.choices))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()  # cancelled ones have their frames, which have this object's streams
        for choice, stream in zip(self.choices, self.streams, strict=True):
            if choice.finish_reason is None:
                await stream.abort()

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        # Bounded, so that a slow reader leaves the outputs in the streams, where they merge.
        queue: asyncio.Queue[Delta | Exception] = asyncio.Queue(maxsize=len(self.choices))

        async def pump(choice: Choice, stream: RequestStream) -> None:
            try:
                async for delta in _follow(choice, stream):
                    await queue.put(delta)
            except Exception as error:
                await queue.put(error)

        for choice, stream in zip(self.choices, self.streams, strict=True):
            self._tasks.append(asyncio.ensure_future(pump(choice, stream)))
            if len(self._tasks) % CHOICES_AT_A_TIME == 0:
                await asyncio.sleep(0)  # others' requests first
        num_open = len(self.choices)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.finish_reason is not None
            yield item


async def _follow(choice: Choice, stream: RequestStream) -> AsyncGenerator[Delta, None]:
    """One sequence's deltas up to its end; a stop string aborts the engine's work at once."""
    async for output in stream:
        delta = choice.advance(output)
        if choice.finish_reason is not None and output.finish_reason is None:
            await stream.abort()
        if delta is not None:
            yield delta
        if choice.finish_reason is not None:
            return
    raise EngineUnavailableError("The engine ended this request without a completion.")


def values_of_entries(entries: Sequence[TokenEntry]) -> int:
    """Tokens that they list. One counts for all, as they are asked for together: there may be millions."""
    return len(entries) * (1 + len(entries[0].logprobs.top_token_ids)) if entries else 0


def values_of_scores(prompt_logprobs: Sequence[PromptScores]) -> int:
    """Likewise, of a prompt."""
    return sum(len(scores) * (1 + scores.num_top) for scores in prompt_logprobs)
