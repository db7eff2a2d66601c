"""Items as the API lists them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from tessera.app.openai.conversations.items import InputItem, MessageItem, ReasoningItem

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
}


def listed_items(items: Iterable[InputItem]) -> tuple[dict[str, Any], ...]:
    """Each item in OpenAI's form, with an id of its own where it came without one."""
    return tuple(map(_listed, items))


def new_item_id(kind: str) -> str:
    return f"{PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}"


def _listed(item: InputItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        part: dict[str, Any] = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.content, "annotations": [], "logprobs": []}
        return {**_head(item), "role": item.role, "content": [part]}
    if isinstance(item, ReasoningItem):
        content = [{"type": "reasoning_text", "text": item.content}] if item.content else []
        summary = [{"type": "summary_text", "text": item.summary}] if item.summary else []
        sealed = {"encrypted_content": item.encrypted_content} if item.encrypted_content else {}
        return {**_head(item), "summary": summary, "content": content, **sealed}
    return {**_head(item), **item.model_dump(exclude={"id", "type"}, exclude_none=True, by_alias=True)}


def _head(item: InputItem) -> dict[str, Any]:
    return {"id": item.id or new_item_id(item.type), "type": item.type, "status": "completed"}
