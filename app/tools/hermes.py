"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as many as are needed."""

from __future__ import annotations

from tessera.app.tools.parser import JsonCallParser, skip_space

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser(JsonCallParser):
    """The closing tag may be missing, and one pair of tags may hold several objects."""

    openers = (BEGIN,)
    markers = (BEGIN, END)
    end_marker = END

    def _after(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        if text.startswith("{", position):
            self._open("")
            return position
        _, end = self._read_literal(text, position, (END,))
        if not self._held:
            self._state = self._content
        return end
