"""Tool parsers and other readers of model output: backtracking expressions took quadratic time on hostile text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from app.reasoning import ReasoningSplitter
from app.stop_strings import StopMatcher
from app.tools.formats import FORMATS

NOTICEABLE = 0.05  # seconds, much less than anything quadratic takes for these sizes
ATTEMPTS = 6  # the best of several, because other work on the machine only adds to a time
LARGEST_RATIO = 2.5  # of the times for a text and for its half
TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "tags": {"type": "array"}}},
    "ping": {},
}

# Texts that have made parsers of this kind take quadratic or exponential time, each a prefix and what is repeated.
HOSTILE = [
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


def check_linear(read: Callable[[str], None], text: str) -> None:
    """Twice the text takes about twice the processor time."""
    whole = half = math.inf
    for _ in range(ATTEMPTS):
        whole, half = min(whole, seconds(read, text)), min(half, seconds(read, text[: len(text) // 2]))
        if whole < NOTICEABLE or whole < LARGEST_RATIO * half:
            return
    assert whole < LARGEST_RATIO * half


def seconds(read: Callable[[str], None], text: str) -> float:
    start = time.process_time()
    read(text)
    return time.process_time() - start


@pytest.mark.parametrize(("piece", "size"), [(2**20, 2**20), (16, 2**18)])
@pytest.mark.parametrize(("name", "prefix", "repeated"), HOSTILE)
def test_fault_tool_parsers_take_twice_the_time_for_twice_the_text(
    name: str, prefix: str, repeated: str, piece: int, size: int
) -> None:
    def read(text: str) -> None:
        parser = FORMATS[name].parser(TOOLS)  # type: ignore[index]
        for position in range(0, len(text), piece):
            parser.feed(text[position : position + piece])
            parser.take()
        parser.finish(cut=True)
        parser.take()

    check_linear(read, prefix + repeated * (size // len(repeated)))


@pytest.mark.parametrize("repeated", ["</think", " \n", "<think>", "x"])
def test_fault_tool_parsers_nor_does_telling_reasoning_apart(repeated: str) -> None:
    def read(text: str) -> None:
        splitter = ReasoningSplitter(opened=True)
        for position in range(0, len(text), 64):
            splitter.feed(text[position : position + 64])
        splitter.flush()

    check_linear(read, repeated * (2**20 // len(repeated)))


@pytest.mark.parametrize("stop", ["a" * 255 + "b", "ab" * 127 + "b"])
def test_fault_tool_parsers_nor_does_looking_for_stop_strings(stop: str) -> None:
    def read(text: str) -> None:
        matcher = StopMatcher([stop], include_stop=False)
        for position in range(0, len(text), 4):
            matcher.feed(text[position : position + 4])
        matcher.flush()

    check_linear(read, "ab" * 2**16)
