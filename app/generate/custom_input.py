"""The input of a custom tool, from the JSON arguments of the function that the model was offered."""

from __future__ import annotations

import json
import re

from tessera.app.schema.custom_tools import INPUT

MAX_HEAD = 64  # characters before the input begins

_STRING = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)


class CustomInput:
    """Reads `{"input": "..."}` piece by piece and gives out the string's text; anything else is given out as it is."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "head"

    def read_arguments(self, text: str) -> str:
        """The input's text that is sure now."""
        text = self._held + text
        self._held = ""
        if self._state == "head":
            begin = _input_begin(text)
            if begin is None:
                self._held = text
                if len(text) <= MAX_HEAD and _may_begin_input(text):
                    return ""
                self._state = "raw"
                self._held = ""
                return text
            self._state, text = "string", text[begin:]
        if self._state == "raw":
            return text
        return self._read_string(text) if self._state == "string" else ""

    def finish(self) -> str:
        """The text that was held back, now that no more comes."""
        held, self._held = self._held, ""
        return held if self._state == "head" else ""

    def _read_string(self, text: str) -> str:
        end = _string_end(text)
        body = text if end is None else text[:end]
        if end is None:
            cut = _whole_escapes(body)
            body, self._held = body[:cut], body[cut:]
        else:
            self._state = "tail"
        try:
            decoded: str = json.loads(f'"{body}"', strict=False)
        except json.JSONDecodeError:
            return body
        return decoded


def _input_begin(text: str) -> int | None:
    """Where the string begins, after its quote."""
    rest = text.lstrip()
    for mark in ("{", f'"{INPUT}"', ":", '"'):
        if not rest.startswith(mark):
            return None
        rest = rest[len(mark) :]
        if mark != '"':
            rest = rest.lstrip()
    return len(text) - len(rest)


def _may_begin_input(text: str) -> bool:
    """Whether more text can make this the beginning of the input."""
    squeezed = "".join(text.split())
    return f'{{"{INPUT}":"'.startswith(squeezed)


def _string_end(text: str) -> int | None:
    """Where the closing quote is."""
    found = _STRING.match(text)
    return found.end() - 1 if found is not None else None


def _whole_escapes(text: str) -> int:
    """The length of the text up to an escape, or half of a surrogate pair, that may not be whole."""
    tail = text[-12:]
    for start in range(len(tail)):
        if tail[start] != "\\":
            continue
        before = text[: len(text) - len(tail) + start]
        if (len(before) - len(before.rstrip("\\"))) % 2:
            continue  # the second of a pair
        escape = tail[start:]
        if len(escape) < 2 or (escape[1] == "u" and (len(escape) < 6 or _is_open_surrogate(escape))):
            return len(text) - len(escape)
    return len(text)


def _is_open_surrogate(escape: str) -> bool:
    return escape[2:4].lower() in ("d8", "d9", "da", "db") and len(escape) < 12
