"""A completion as output items, and the events that report their growth."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tessera.app.openai.conversations.tools import CalledTool
from tessera.app.tools.parts import CallArguments, CallStart, Content, Part, Reasoning

Event = dict[str, Any]
ItemStatus = Literal["completed", "incomplete"]

CALL_EVENTS = {
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


class OutputWriter:
    """Turns the parts of one completion into items; each method returns the events that this causes.

    At most one item is open: a part of another kind closes it and opens the next.

    Args:
        tools: the client's tools by the names by which the model knows them.
        seal: makes the `encrypted_content` of reasoning; None leaves it out.

    Attributes:
        items: the output so far; the last one may still be open.
    """

    def __init__(
        self,
        first_sequence_number: int,
        tools: Mapping[str, CalledTool],
        seal: Callable[[str], str] | None,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._seal = seal
        self._sequence_number = first_sequence_number
        self._kind = ""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def write_parts(self, parts: Sequence[Part], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Append parts to the output; `logprobs` belong to their text, or to the next text if they have none."""
        self._logprobs += logprobs
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Content):
                events += self._opened("message")
                events.append(self._text_delta(part.text))
            elif isinstance(part, Reasoning):
                events += self._opened("reasoning")
                events.append(self._delta("response.reasoning_text.delta", part.text, content_index=0))
            elif isinstance(part, CallStart):
                events += self._closed("completed")
                events += self._open_call(part)
            elif isinstance(part, CallArguments):
                events.append(self._delta(f"{CALL_EVENTS[self._kind]}.delta", part.text))
        return events

    def finish(self, status: ItemStatus) -> list[Event]:
        """End the output; without any parts it is a message without text."""
        events = [] if self.items else self._opened("message")
        return events + self._closed(status)

    def event(self, kind: str, **fields: Any) -> Event:
        number = self._sequence_number
        self._sequence_number += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _opened(self, kind: str) -> list[Event]:
        if self._kind == kind:
            return []
        events = self._closed("completed")
        self._kind = kind
        if kind == "message":
            item = {
                "id": _new_id("msg"),
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
        else:
            item = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        self.items.append(item)
        events.append(self._item_event("response.output_item.added", item=_copy(item)))
        part = _text_part("", []) if kind == "message" else {"type": "reasoning_text", "text": ""}
        events.append(self._content_event("response.content_part.added", part=part))
        return events

    def _open_call(self, start: CallStart) -> list[Event]:
        tool = self._tools.get(start.name, CalledTool(start.name))
        self._kind = "custom_tool_call" if tool.is_custom else "function_call"
        text = {"input": ""} if tool.is_custom else {"arguments": ""}
        namespace = {"namespace": tool.namespace} if tool.namespace is not None else {}
        item = {"id": _new_id("ctc" if tool.is_custom else "fc"), "type": self._kind, "call_id": start.id}
        self.items.append({**item, "name": tool.name, **namespace, **text, "status": "in_progress"})
        return [self._item_event("response.output_item.added", item=_copy(self.items[-1]))]

    def _text_delta(self, text: str) -> Event:
        item = self.items[-1]
        if not item["content"]:
            item["content"].append(_text_part("", []))
        logprobs, self._logprobs = self._logprobs, []
        item["content"][0]["logprobs"] += logprobs
        return self._delta("response.output_text.delta", text, content_index=0, logprobs=logprobs)

    def _delta(self, kind: str, text: str, **fields: Any) -> Event:
        self._texts.append(text)
        return self._item_event(kind, item_id=self.items[-1]["id"], delta=text, **fields)

    def _closed(self, status: ItemStatus) -> list[Event]:
        if not self._kind:
            return []
        item, kind, text = self.items[-1], self._kind, "".join(self._texts)
        self._kind = ""
        self._texts = []
        item["status"] = status
        events = []
        if kind == "function_call":
            item["arguments"] = text
            events.append(
                self._item_event(
                    "response.function_call_arguments.done", item_id=item["id"], name=item["name"], arguments=text
                )
            )
        elif kind == "custom_tool_call":
            item["input"] = text
            events.append(self._item_event("response.custom_tool_call_input.done", item_id=item["id"], input=text))
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            if self._seal is not None:
                item["encrypted_content"] = self._seal(text)
            events.append(self._content_event("response.reasoning_text.done", text=text))
            events.append(self._content_event("response.content_part.done", part=part))
        else:
            part = _text_part(text, item["content"][0]["logprobs"] if item["content"] else [])
            item["content"] = [part]
            logprobs = part["logprobs"]
            events.append(self._content_event("response.output_text.done", text=text, logprobs=logprobs))
            events.append(self._content_event("response.content_part.done", part=part))
        events.append(self._item_event("response.output_item.done", item=_copy(item)))
        return events

    def _content_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, item_id=self.items[-1]["id"], content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self.event(kind, output_index=len(self.items) - 1, **fields)


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "content": list(item["content"])} if "content" in item else dict(item)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"
