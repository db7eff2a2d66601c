"""Reads completions of messages: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final...`.

The prompt ends with `<|start|>assistant`, so that a completion begins within a header. A message with a recipient is a
call: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`; the recipient may also stand
before the channel. Source: docs/format.md of openai/harmony.
"""

from __future__ import annotations

import re

from tessera.app.reasoning.harmony import (
    ANALYSIS,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL,
    MESSAGE,
    NAMESPACE,
    RETURN,
    START,
)
from tessera.app.tools.call import CALLED_NAME
from tessera.app.tools.json_value import skip_space
from tessera.app.tools.parser import ToolParser, ToolSchemas
from tessera.app.tools.parts import new_call_id

MAX_HEADER = 512  # characters
ENDS = (END, CALL, RETURN, START, CHANNEL)  # of a message; the last two where its end was left out
HEADER_BEGINS = (START, CHANNEL, MESSAGE, CONSTRAIN, "assistant", "to=")
BETWEEN = "\n\n"  # two messages of one kind
NO_TOOLS = frozenset({"assistant", "user", "all"})  # recipients that are none

_END = re.compile("|".join(map(re.escape, ENDS)))
_HEADER_END = re.compile("|".join(map(re.escape, (MESSAGE, END, CALL, RETURN))))
_RECIPIENT = re.compile(r"(?:^|\s|>)to=([^\s<]+)")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")


class HarmonyParser(ToolParser):
    """Text outside of messages is content; headers that break off are dropped."""

    openers = (START, CHANNEL)
    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None, continues: bool = False) -> None:
        """`continues`: the completion begins within the final message."""
        super().__init__(tools, max_calls=max_calls)
        self._header: list[str] = []
        self._header_length = 0
        self._kinds: set[str] = set()  # of the messages that have text
        self._kind = FINAL
        self._is_empty = True  # the message has no text yet
        self._call_is_open = False
        self._state = self._body if continues else self._header_start

    @property
    def thinking(self) -> bool:
        return self._state == self._body and self._kind == ANALYSIS

    def _open(self, opener: str) -> None:
        self._begin_header(opener)
        self._state = self._in_header

    def _begin_header(self, text: str) -> None:
        self._header = [text]
        self._header_length = len(text)
        self._state = self._header_start

    def _header_start(self, text: str, position: int) -> int:
        """At the beginning of the completion and after each message."""
        start = skip_space(text, position)
        self._header.append(text[position:start])
        self._header_length += start - position
        rest = text[start : start + max(map(len, HEADER_BEGINS))]
        if self._header_length >= MAX_HEADER or (rest and not _may_begin_header(rest)):
            self._writer.write_content("".join(self._header))
            self._state = self._content
        elif rest.startswith(HEADER_BEGINS):
            self._state = self._in_header
        else:
            self._held = rest
            return len(text)
        return start

    def _in_header(self, text: str, position: int) -> int:
        limit = position + MAX_HEADER - self._header_length
        found = _HEADER_END.search(text, position, limit)
        end = min(found.start(), limit) if found is not None else len(text)
        if found is None and end < limit:
            end -= self._hold_prefix(text, position, (MESSAGE, END, CALL, RETURN))
        end = min(end, limit)
        self._header.append(text[position:end])
        self._header_length += end - position
        if found is not None:
            if found.group() == MESSAGE:
                self._begin_message("".join(self._header))
            else:
                self._begin_header("")  # a message without a body
            return found.end()
        if self._header_length >= MAX_HEADER:
            self._writer.write_content("".join(self._header))
            self._state = self._content
            return end
        return len(text)

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._kind = channel[1] if channel is not None else FINAL
        self._is_empty = True
        self._state = self._body
        name = recipient[1].removeprefix(NAMESPACE) if recipient is not None else ""
        if self._tools and CALLED_NAME.fullmatch(name) and name not in NO_TOOLS:
            self._kind = "call"
            self._call_is_open = True
            self._writer.begin_call(name, new_call_id())

    def _body(self, text: str, position: int) -> int:
        found = _END.search(text, position)
        if found is None:
            end = len(text) - self._hold_prefix(text, position, ENDS)
            self._write_body(text[position:end])
            return len(text)
        self._write_body(text[position : found.start()])
        self._end_message(found.group())
        return found.end()

    def _write_body(self, text: str) -> None:
        if not text:
            return
        between = ""
        kind = ANALYSIS if self._kind == ANALYSIS else FINAL
        if self._is_empty and self._kind != "call":
            between = BETWEEN if kind in self._kinds else ""
            self._kinds.add(kind)
        self._is_empty = False
        if self._kind == "call":
            self._writer.write_arguments(text)
        elif kind == ANALYSIS:
            self._writer.write_reasoning(between + text)
        else:
            self._writer.write_content(between + text)

    def _end_message(self, end: str) -> None:
        is_final = self._kind == FINAL
        if self._call_is_open:
            self._end_call()
        if end in (START, CHANNEL):
            self._open(end)
        else:
            self._begin_header("")
            self.complete = self.complete or end in (CALL, RETURN) or is_final

    def _end_call(self) -> None:
        if self._is_empty:
            self._writer.write_arguments("{}")
        self._call_is_open = False
        self._call_ended()

    def _end(self, cut: bool) -> None:
        if self._state == self._body:
            self._write_body(self._held)
            if self._call_is_open and not cut:
                self._end_call()
        elif self._state == self._content:
            self._writer.write_content(self._held)
        else:
            header = "".join(self._header) + self._held
            if not header.startswith(("<|", "assistant<|")) and not any(mark in header for mark in self.markers):
                self._writer.write_content(header)


def _may_begin_header(text: str) -> bool:
    return text.startswith(HEADER_BEGINS) or any(begin.startswith(text) for begin in HEADER_BEGINS)
