"""Libraries as their users have them from PyPI and npm: each check of `programs` has the result that is told here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.clients.replies import CITY, HELLO, SO, TOLD, by_prompt, calls_a_final_tool, dspy_reply
from tests.clients.run import TIMEOUT, run_checks
from tests.clients.scripted import DIMENSION, scripted

VECTOR = [0.5] * DIMENSION
CAPABILITIES = ["completion", "tools", "thinking", "embedding"]


REPLY: Mapping[str, Callable[[str], str]] = {
    "instructor": calls_a_final_tool,
    "pydantic-ai": calls_a_final_tool,
    "LlamaIndex": calls_a_final_tool,
    "DSPy": dspy_reply,
}

EXPECTED: Mapping[str, Mapping[str, Any]] = {
    "openai-python": {
        "chat": HELLO,
        "stream": HELLO,
        "stream_helper": ["weather", CITY],
        "tools": TOLD,
        "parse": "Bonn",
        "completions": HELLO,
        "responses": [HELLO, True],
        "responses_stream": SO,
        "responses_tools": TOLD,
        "responses_parse": "Bonn",
        "embeddings": VECTOR,
        "models": ["tiny"],
        "too_long": "context_length_exceeded",
        "unknown_model": "model",
    },
    "openai-node": {
        "chat": HELLO,
        "run_tools": TOLD,
        "parse": CITY,
        "responses_parse": CITY,
        "responses_stream": HELLO,
        "embeddings": VECTOR,
        "too_long": [400, "context_length_exceeded"],
    },
    "anthropic-python": {
        "create": [HELLO, "end_turn"],
        "stream": ["thinking", "text"],
        "tools": ["tool_use", CITY, TOLD],
        "tool_runner": TOLD,
        "count_tokens": True,
        "beta": [HELLO, []],
        "models": ["tiny"],
        "too_long": True,
    },
    "@anthropic-ai/sdk": {
        "create": HELLO,
        "stream": [["thinking", "text"], True, True],
        "tools": [CITY, TOLD],
        "count_tokens": True,
        "models": ["tiny"],
        "too_long": [400, True],
    },
    "AI SDK": {
        "chat_two_turns": [TOLD, 2, HELLO],
        "chat_object": CITY,
        "responses_two_turns": [TOLD, 2, HELLO],
        "responses_object": CITY,
        "anthropic_two_turns": [TOLD, 2, HELLO],
        "anthropic_object": CITY,
        "embeddings": VECTOR,
    },
    "LangChain": {
        "chat_tools": TOLD,
        "chat_object": "Bonn",
        "chat_too_long": True,
        "responses_tools": TOLD,
        "responses_object": "Bonn",
        "responses_too_long": True,
        "anthropic_tools": TOLD,
        "anthropic_object": "Bonn",
        "anthropic_too_long": True,
        "ollama_tools": TOLD,
        "ollama_object": "Bonn",
        "ollama_reasoning": [SO, "hm"],
        "embeddings": [VECTOR, VECTOR],
    },
    "LlamaIndex": {
        "chat": HELLO,
        "stream": HELLO,
        "complete": HELLO,
        "responses": HELLO,
        "agent": TOLD,
        "object": "Bonn",
        "embeddings": VECTOR,
    },
    "litellm": {
        "chat_with_effort": HELLO,
        "tools": ["weather", TOLD],
        "anthropic_tools": ["weather", TOLD],
        "ollama_tools": ["weather", TOLD],
        "responses": HELLO,
        "embeddings": VECTOR,
        "too_long": "ContextWindowExceededError",
        "too_long_by_anthropic": "ContextWindowExceededError",
        "max_tokens_too_large": "ContextWindowExceededError",
    },
    "instructor": {"tools": "Bonn", "json": "Bonn", "json_schema": "Bonn", "partial": "Bonn"},
    "pydantic-ai": {
        "chat": ["Bonn", ["Bonn"]],
        "responses": ["Bonn", ["Bonn"]],
        "anthropic": ["Bonn", ["Bonn"]],
        "stream": HELLO,
    },
    "openai-agents": {
        "responses_tools": [TOLD, HELLO],
        "responses_object": "Bonn",
        "responses_stream": [True, HELLO],
        "chat_tools": [TOLD, HELLO],
        "chat_object": "Bonn",
        "chat_stream": [True, HELLO],
    },
    "DSPy": {
        "predict": SO,
        "chain_of_thought": ["hm", SO],
        "json": SO,
        "react": [TOLD, ["weather", "finish"]],
    },
    "guidellm": {"chat": [3, 0, True], "completions": [3, 0, True]},
    "ollama-python": {
        "chat": [HELLO, "stop"],
        "chat_stream": HELLO,
        "tools": ["weather", CITY, TOLD],
        "thinking": ["hm", SO],
        "object": [CITY, CITY],
        "generate": [HELLO, HELLO],
        "generate_raw_stream": HELLO,
        "load": ["load", "load"],
        "logprobs": [True, -0.5],
        "embeddings": [VECTOR, VECTOR],
        "models": [["tiny:latest"] * 2, CAPABILITIES, 2**19],
        "errors": [404, 400, 400],
    },
    "ollama-js": {
        "chat": HELLO,
        "chat_stream": HELLO,
        "tools": ["weather", CITY, TOLD],
        "thinking": ["hm", SO],
        "object": CITY,
        "generate": HELLO,
        "embeddings": [VECTOR],
        "models": [["tiny:latest"], CAPABILITIES],
        "errors": ["ResponseError", "model 'other' not found: see /api/tags"],
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, Any]]:
    """The results of a client's program, which runs once."""
    found: dict[str, Mapping[str, Any]] = {}

    def of(name: str) -> Mapping[str, Any]:
        if name not in found:
            folder = tmp_path_factory.mktemp("client")
            reply = REPLY.get(name, by_prompt)
            with scripted(folder / "model", reply) as (url, _):
                found[name] = run_checks(name, url, folder)
        return found[name]

    return of


CHECKS = [
    pytest.param(name, check, marks=pytest.mark.client(name), id=f"{name}-{check}")
    for name, checks in EXPECTED.items()
    for check in checks
]


@pytest.mark.parametrize(("name", "check"), CHECKS)
@pytest.mark.timeout(2 * TIMEOUT)
def test_check(results: Callable[[str], Mapping[str, Any]], name: str, check: str) -> None:
    found = results(name)
    assert check in found, f"the program ended early: {found.get('')}"
    if isinstance(found[check], str) and found[check].startswith("failed: "):
        pytest.fail(found[check])
    assert found[check] == EXPECTED[name][check]
