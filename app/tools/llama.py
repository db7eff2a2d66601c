"""Llama 3: `{"name": ..., "parameters": {...}}` alone or after `<|python_tag|>`; `;` between calls."""

from __future__ import annotations

from tessera.app.tools.call_object import CallObject
from tessera.app.tools.parser import JsonCallParser, ToolSchemas, skip_space

PYTHON_TAG = "<|python_tag|>"


class LlamaParser(JsonCallParser):
    """A bare object is a call only at the beginning of the completion, with an offered name and with arguments.

    Any other is content that happens to be JSON.
    """

    openers = markers = (PYTHON_TAG,)
    end_marker = PYTHON_TAG
    reads_bare_calls = True

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._state = self._start

    def _new_call(self) -> CallObject:
        return CallObject(self._writer, self._accepts, strict=True)

    def _accepts(self, name: str) -> bool:
        return name in self._tools

    def _start(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        self._writer.write_content(text[position:end])
        if end == len(text):
            return end
        if text[end] == "{":
            self._open("")
        else:
            self._state = self._content
        return end

    def _after(self, text: str, position: int) -> int:
        end = skip_space(text, position)
        if end == len(text):
            return end
        if text[end] == ";":
            self._state = self._between
            return end + 1
        self._state = self._content
        return end

    def _between(self, text: str, position: int) -> int:
        """After a semicolon, which belongs to the calls only if another one follows."""
        end = skip_space(text, position)
        if end == len(text):
            return end
        if text[end] == "{":
            self._open(";")
        else:
            self._writer.write_content(";")
            self._state = self._content
        return end

    def _end(self, cut: bool) -> None:
        if self._state == self._between:
            self._writer.write_content(";")
        super()._end(cut)
