"""Tools that Anthropic defines and the client runs, offered to the model as functions with the documented parameters.

Source: https://platform.claude.com/docs/en/agents-and-tools/tool-use (bash, text editor, memory, computer use)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from tessera.app.schema.fields import MAX_INT32, MAX_NAME
from tessera.app.schema.tool_names import ToolName
from tessera.app.schema.tools import Tool

CLIENT_TOOLS = ("bash_", "text_editor_", "memory_", "computer_")  # a date follows
TOOLSET = "computer_toolset_"  # whose calls name its members; not supported
WITHOUT_UNDO = "text_editor_20250429"  # and later versions
WITH_SCROLLING = "computer_20250124"

_TEXT = {"type": "string"}
_POINT = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}

_EDITS: Mapping[str, Any] = {
    "path": {**_TEXT, "description": "Absolute path of a file or a directory."},
    "file_text": {**_TEXT, "description": "The whole text of the file to create."},
    "old_str": {**_TEXT, "description": "For str_replace: the text to replace; it must occur exactly once."},
    "new_str": {**_TEXT, "description": "For str_replace: the text to put in its place."},
    "insert_line": {"type": "integer", "description": "For insert: the line after which to insert; 0: the beginning."},
    "insert_text": {**_TEXT, "description": "For insert: the text to insert."},
    "view_range": {**_LINES, "description": "For view: first and last line, counted from 1; -1 is the end."},
}
_POINTING = ("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click")
_OLDER_ACTIONS = (*_POINTING, "double_click", "screenshot", "cursor_position")
_NEWER_ACTIONS = ("left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click")


class ClientTool(BaseModel):
    """A tool of Anthropic's that the client runs: a shell, an editor of files, a memory or a computer."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Annotated[
        str,
        Field(max_length=MAX_NAME, description="A date follows."),
        WithJsonSchema({"type": "string", "enum": list(CLIENT_TOOLS)}),
    ]
    name: ToolName
    max_characters: int | None = Field(default=None, ge=1, le=MAX_INT32)
    display_width_px: int | None = Field(default=None, ge=1, le=MAX_INT32)
    display_height_px: int | None = Field(default=None, ge=1, le=MAX_INT32)
    display_number: int | None = Field(default=None, ge=0, le=MAX_INT32)

    def for_chat(self) -> Tool:
        """The tool as Chat Completions has it."""
        description, parameters = self._function()
        function = {"name": self.name, "description": description, "parameters": parameters}
        return Tool.model_validate({"type": "function", "function": function})

    def _function(self) -> tuple[str, dict[str, Any]]:
        if self.type.startswith("bash_"):
            command = {**_TEXT, "description": "The command to run; required unless restart is true."}
            restart = {"type": "boolean", "description": "Start the shell anew."}
            description = "Runs commands in a bash shell that keeps its state between calls."
            return description, _parameters({"command": command, "restart": restart}, ())
        if self.type.startswith("text_editor_"):
            commands: tuple[str, ...] = ("view", "create", "str_replace", "insert")
            if self.type < WITHOUT_UNDO:
                commands = (*commands, "undo_edit")
            shown = "" if self.max_characters is None else f" A view shows at most {self.max_characters} characters."
            description = f"Views, creates and edits files.{shown}"
            return description, _parameters({"command": _one_of(commands), **_EDITS}, ("command", "path"))
        if self.type.startswith("memory_"):
            commands = ("view", "create", "str_replace", "insert", "delete", "rename")
            paths = {"path": {**_TEXT, "description": "A path under /memories."}}
            paths |= {"old_path": {**_TEXT, "description": "For rename."}, "new_path": _TEXT}
            description = "Keeps notes in files under /memories, which last from one conversation to the next."
            return description, _parameters({"command": _one_of(commands), **_EDITS, **paths}, ("command",))
        return self._computer()

    def _computer(self) -> tuple[str, dict[str, Any]]:
        screen = ""
        if self.display_width_px is not None and self.display_height_px is not None:
            screen = f" The screen has {self.display_width_px} x {self.display_height_px} pixels."
        coordinate = {**_POINT, "description": "x and y in pixels from the upper left corner."}
        properties: dict[str, Any] = {"coordinate": coordinate, "text": {**_TEXT, "description": "Text or keys."}}
        actions: tuple[str, ...] = _OLDER_ACTIONS
        if self.type >= WITH_SCROLLING:
            actions += _NEWER_ACTIONS
            directions = _one_of(("up", "down", "left", "right"))
            properties |= {"scroll_direction": directions, "scroll_amount": {"type": "integer"}}
            properties |= {"start_coordinate": _POINT, "duration": {"type": "number", "description": "Seconds."}}
        description = f"Uses the mouse and keyboard of a computer.{screen}"
        return description, _parameters({"action": _one_of(actions), **properties}, ("action",))


def _one_of(names: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


def _parameters(properties: Mapping[str, Any], required: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}
