"""Tool parsers and other readers of model output: backtracking expressions took quadratic time on hostile text."""

from __future__ import annotations

import gc
import math
import re
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tessera.app.reasoning.format import THINK, ReasoningFormat
from tessera.app.reasoning.granite import GRANITE_32, GRANITE_33
from tessera.app.reasoning.splitter import ReasoningSplitter
from tessera.app.text.stop_strings import StopMatcher
from tessera.app.tools.formats.registry import FORMATS
from tests.support.cases import tool_cases

NOTICEABLE = 0.02  # seconds
ATTEMPTS = 5  # the best of several, because other work on the machine only adds to a time
TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "tags": {"type": "array"}}},
    "ping": {},
}

# Texts that have made parsers of this kind take quadratic or exponential time, each a prefix and what is repeated.
HOSTILE = [
    *tool_cases.HOSTILE,
    ("hermes", "", "<tool_call>"),
    ("hermes", "", "<tool_cal"),
    ("hermes", "", "<tool_call>{"),
    ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": '),
    ("hermes", "", " \n"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\\\"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": x', "</tool_call"),
    ("hermes", '<tool_call>{"arguments": {"a": "', "</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1"),
    ("qwen3_coder", "", "<function="),
    ("qwen3_coder", "", "<tool_call><function=f>"),
    ("qwen3_coder", "<function=weather><parameter=city>", "</parameter"),
    ("qwen3_coder", "<function=weather><parameter=city>", "\n"),
    ("qwen3_coder", "<function=weather><parameter=tags>", "["),
    ("qwen3_coder", "<function=weather>", "<parameter=a>1</parameter>"),
    ("llama3_json", "", "<|python_tag|>{"),
    ("llama3_json", "", "{"),
    ("llama3_json", "", '{"name": "ping", "parameters": {}}; '),
    ("mistral", "", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]", "x"),
    ("mistral", "", "[TOOL_CALLS]ping[ARGS]{"),
    ("mistral", "[TOOL_CALLS][", '{"name": "ping"},'),
]


class Counted(str):
    """Text that counts, with all that is cut from it or made with it, the characters looked at and copied."""

    num_looked_at: ClassVar[int] = 0

    @classmethod
    def _add(cls, count: int) -> None:
        cls.num_looked_at += count

    def _made(self, text: str) -> Counted:
        self._add(len(text))
        return type(self)(text)

    def __getitem__(self, key: Any) -> Counted:
        return self._made(super().__getitem__(key))

    def __add__(self, other: str) -> Counted:
        return self._made(super().__add__(other))

    def __radd__(self, other: str) -> Counted:
        return self._made(str(other) + str(self))

    def find(self, sub: str, start: Any = 0, end: Any = None) -> int:
        found = super().find(sub, start, end)
        last = len(self) if end is None else min(end, len(self))
        self._add((found if found >= 0 else last) - start + len(sub))
        return found

    def search_by(self, search: Callable[[str, int], re.Match[str] | None], start: int) -> re.Match[str] | None:
        found = search(self, start)
        self._add((found.end() if found is not None else len(self)) - start)
        return found


def num_looked_at(name: str, text: str, piece: int) -> int:
    """Characters that reading a whole answer looks at or copies."""

    class Text(Counted):
        pass

    parser = FORMATS[name].parser(TOOLS)  # type: ignore[index]
    search = parser._find_opener

    def find_opener(found_in: str, start: int) -> re.Match[str] | None:
        return Text(found_in).search_by(search, start)

    setattr(parser, "_find_opener", find_opener)  # noqa: B010 (a method of another signature)
    for position in range(0, len(text), piece):
        parser.read_text(Text(text[position : position + piece]))
        parser.take_parts()
    parser.finish(cut=True)
    parser.take_parts()
    return Text.num_looked_at


@pytest.mark.parametrize("piece", [2**13, 16])
@pytest.mark.parametrize(("name", "prefix", "repeated"), HOSTILE)
def test_fault_tool_parsers_look_at_a_text_in_proportion_to_its_length(
    name: str, prefix: str, repeated: str, piece: int
) -> None:
    text = prefix + repeated * (2**13 // len(repeated))
    whole, quarter = num_looked_at(name, text, piece), num_looked_at(name, text[: len(text) // 4], piece)
    assert quarter >= len(text) // 4, "every character is looked at"
    assert whole <= 5 * quarter


def seconds(read: Callable[[str], None], text: str) -> float:
    """Processor time, without the garbage collector's, which grows with the whole process."""
    gc.disable()
    try:
        start = time.process_time()
        read(text)
        return time.process_time() - start
    finally:
        gc.enable()


def check_linear(read: Callable[[str], None], text: str, *, parts: int = 4, largest_ratio: float = 8) -> None:
    """Four times the text takes four times as long, not sixteen times."""
    whole = part = math.inf
    for _ in range(ATTEMPTS):
        whole = min(whole, seconds(read, text))
        if whole < NOTICEABLE:
            return
        part = min(part, seconds(read, text[: len(text) // parts]))
        if whole < largest_ratio * part:
            return
    assert whole < largest_ratio * part


def parse(name: str, text: str, piece: int) -> None:
    parser = FORMATS[name].parser(TOOLS)  # type: ignore[index]
    for position in range(0, len(text), piece):
        parser.read_text(text[position : position + piece])
        parser.take_parts()
    parser.finish(cut=True)
    parser.take_parts()


@pytest.mark.parametrize(("name", "prefix", "repeated"), HOSTILE)
def test_fault_tool_parsers_take_time_in_proportion_to_the_text(name: str, prefix: str, repeated: str) -> None:
    """Whatever is done besides looking at it."""
    check_linear(lambda text: parse(name, text, 16), prefix + repeated * (2**17 // len(repeated)))


@pytest.mark.parametrize(
    ("name", "prefix", "repeated"),
    [
        ("hermes", "", '<tool_call>{"name": "f", "arguments": {"a": '),
        ("qwen3_coder", "<function=weather><parameter=city>", "</parameter"),
        ("llama3_json", "", '{"name": "ping", "parameters": {}}; '),
        ("mistral", "", "[TOOL_CALLS]ping[ARGS]{"),
    ],
)
def test_fault_tool_parsers_take_twice_the_time_for_a_megabyte(name: str, prefix: str, repeated: str) -> None:
    text = prefix + repeated * (2**20 // len(repeated))
    check_linear(lambda text: parse(name, text, 2**20), text, parts=2, largest_ratio=2.5)


@pytest.mark.parametrize(
    ("form", "prefix"),
    [
        *((THINK, prefix) for prefix in ("", "</think>")),
        *((GRANITE_32, prefix) for prefix in ("", GRANITE_32.end)),
        *((GRANITE_33, prefix) for prefix in ("", "</think>", "</think><response>", "</think><response></response>")),
    ],
)
@pytest.mark.parametrize("repeated", ["</think", " \n", "<think>", "x", "</response", "</response>", "Here is my"])
def test_fault_tool_parsers_as_linear_is_telling_reasoning_apart(
    form: ReasoningFormat, prefix: str, repeated: str
) -> None:
    def read(text: str) -> None:
        splitter = ReasoningSplitter(form, opened=True)
        for position in range(0, len(text), 16):
            splitter.split_text(text[position : position + 16])
        splitter.flush()

    check_linear(read, prefix + repeated * (2**18 // len(repeated)))


@pytest.mark.parametrize("stop", ["a" * 255 + "b", "ab" * 127 + "b"])
def test_fault_tool_parsers_as_linear_is_looking_for_stop_strings(stop: str) -> None:
    def read(text: str) -> None:
        matcher = StopMatcher([stop], include_stop=False)
        for position in range(0, len(text), 4):
            matcher.match_text(text[position : position + 4])
        matcher.flush()

    check_linear(read, "ab" * 2**15)
