"""The items of a request as `/v1/responses/{id}/input_items` lists them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tessera.app.openai.responses.schema import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)
from tessera.app.schema.fields import MAX_NAME
from tessera.engine.contract.errors import InvalidRequestError

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
ORDERS = ("asc", "desc")
PAGE_QUERY: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    "order": {"type": "string", "enum": list(ORDERS), "default": "desc"},
    "after": {"type": "string", "maxLength": MAX_NAME, "description": "The id of the item before the first."},
}


def listed_items(items: Iterable[InputItem]) -> tuple[dict[str, Any], ...]:
    """Each item in OpenAI's form, with an id of its own."""
    return tuple(map(_listed, items))


def item_page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of a list: `limit` items after the one with the id `after`, in `order`.

    Raises:
        InvalidRequestError: a query parameter is wrong.
    """
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise InvalidRequestError(f"order must be one of {', '.join(ORDERS)}.", param="order")
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT):
        raise InvalidRequestError(f"limit must be an integer from 1 to {MAX_LIMIT}.", param="limit")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    ids = [item["id"] for item in ordered]
    start = 0
    if "after" in query:
        if query["after"] not in ids:
            raise InvalidRequestError("after must be the id of one of the response's input items.", param="after")
        start = ids.index(query["after"]) + 1
    page = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(ordered),
    }


def _listed(item: InputItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        part: dict[str, Any] = {"type": "input_text", "text": item.content}
        if item.role == "assistant":
            part = {"type": "output_text", "text": item.content, "annotations": [], "logprobs": []}
        return {**_head("msg", item.type), "role": item.role, "content": [part]}
    if isinstance(item, FunctionCallItem):
        call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return {**_head("fc", item.type), **call}
    if isinstance(item, FunctionCallOutputItem):
        return {**_head("fco", item.type), "call_id": item.call_id, "output": item.output}
    assert isinstance(item, ReasoningItem)
    content = [{"type": "reasoning_text", "text": item.content}] if item.content else []
    summary = [{"type": "summary_text", "text": item.summary}] if item.summary else []
    return {**_head("rs", item.type), "summary": summary, "content": content}


def _head(prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}_{secrets.token_hex(24)}", "type": kind, "status": "completed"}
