"""A completion as content blocks, and the events that report their growth."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from tessera.app.generate.generation import FinishReason, Usage
from tessera.app.tools.parts import CallArguments, CallStart, Content, Part, Reasoning

Event = dict[str, Any]


class MessageHead:
    """The message without its content."""

    def __init__(self, model: str) -> None:
        self._fields = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}

    def message(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            **self._fields,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }


def messages_usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's `input_tokens` leaves out the tokens that were read from the cache."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
    }


def stop_reason(finish_reason: FinishReason | None, stop_sequence: str | None, *, uses_tools: bool) -> str:
    if finish_reason == "length":
        return "max_tokens"
    if stop_sequence is not None:
        return "stop_sequence"
    return "tool_use" if uses_tools else "end_turn"


class BlockWriter:
    """Turns the parts of one completion into blocks; each method returns the events that this causes.

    Args:
        seal: makes the signature of reasoning that is omitted; None shows it.

    Attributes:
        blocks: the content so far; the last block may still be open.
    """

    def __init__(self, seal: Callable[[str], str] | None = None) -> None:
        self._seal = seal
        self.blocks: list[dict[str, Any]] = []
        self._open = ""
        self._texts: list[str] = []

    @property
    def uses_tools(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def write_parts(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Content):
                events += self._opened("text", {"type": "text", "text": ""})
                events.append(self._delta({"type": "text_delta", "text": part.text}, part.text))
            elif isinstance(part, Reasoning):
                events += self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                shown = self._delta({"type": "thinking_delta", "thinking": part.text}, part.text)
                events += [shown] if self._seal is None else []
            elif isinstance(part, CallStart):
                events += self.finish()
                block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                events += self._opened("tool_use", block)
            elif isinstance(part, CallArguments):
                events.append(self._delta({"type": "input_json_delta", "partial_json": part.text}, part.text))
        return events

    def finish(self) -> list[Event]:
        """Close the block that is open, if one is."""
        if not self._open:
            return []
        block, text = self.blocks[-1], "".join(self._texts)
        events: list[Event] = []
        if self._open == "tool_use":
            block["input"] = _parsed_input(text)
        elif self._open == "text" or self._seal is None:
            block[self._open] = text
        if self._open == "thinking":
            block["signature"] = _signature(text) if self._seal is None else self._seal(text)
            events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}, ""))
        self._open = ""
        self._texts = []
        events.append({"type": "content_block_stop", "index": len(self.blocks) - 1})
        return events

    def _opened(self, kind: str, block: dict[str, Any]) -> list[Event]:
        if self._open == kind:
            return []
        events = self.finish()
        self._open = kind
        self.blocks.append(block)
        events.append({"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)})
        return events

    def _delta(self, delta: dict[str, Any], text: str) -> Event:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _signature(thinking: str) -> str:
    """Clients send reasoning back only with a signature, and some none without; it is not checked."""
    return base64.b64encode(hashlib.blake2b(thinking.encode(), digest_size=32).digest()).decode()


def _parsed_input(text: str) -> dict[str, Any]:
    """A call's arguments; an empty object if they were cut, which `stop_reason` then says."""
    try:
        parsed = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {}
