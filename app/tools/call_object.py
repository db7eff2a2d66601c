"""A call written as a JSON object: {"name": ..., "arguments": {...}}, in any order of its members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import orjson

from tessera.app.tools.call import CALLED_NAME, MAX_CALLED_NAME, MAX_KEY, Call
from tessera.app.tools.json_value import JsonValue, skip_space
from tessera.app.tools.parts import PartWriter, new_call_id

MAX_NAME = 2 * MAX_CALLED_NAME  # characters of the called name as it is written, with its quotes

ARGUMENT_MEMBERS = frozenset({"arguments", "parameters"})
OTHER_MEMBERS = frozenset({"type", "id"})

Role = Literal["name", "arguments", ""]

_VALUE = "value"


class CallObject(Call):
    """Reads one object. Its call begins when the name is known and the arguments have begun as an object."""

    def __init__(
        self,
        writer: PartWriter,
        accepts: Callable[[str], bool],
        *,
        strict: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """
        Args:
            accepts: whether a name may be called.
            strict: an object with unknown members or without arguments is no call.
        """
        super().__init__(writer, new_id)
        self._accepts = accepts
        self._strict = strict
        self._expected = "{"
        self._value: JsonValue | None = None
        self._pieces: list[str] = []  # of the key or value that is being read and not given out
        self._num_chars = 0
        self._is_key = False
        self._role: Role = ""
        self._roles: set[Role] = set()
        self._name: str | None = None
        self._arguments: str | None = None

    def read_call(self, text: str, start: int) -> int:
        position = start
        while position < len(text) and not self.ended:
            if self._value is not None:
                position = self._member(self._value, text, position)
            else:
                position = self._punctuation(text, position)
        return position

    def _punctuation(self, text: str, position: int) -> int:
        position = skip_space(text, position)
        if position == len(text):
            return position
        character = text[position]
        if self._expected == _VALUE or (character == '"' and '"' in self._expected):
            self._is_key = self._expected != _VALUE
            self._value = JsonValue()
            self._pieces = []
            self._num_chars = 0
            return position
        if character not in self._expected:
            self._fail()
            return position
        if character == "}":
            self._close()
        self._expected = {"{": '"}', ":": _VALUE, ",": '"', "}": ""}[character]
        return position + 1

    def _member(self, value: JsonValue, text: str, position: int) -> int:
        limit = MAX_KEY if self._is_key else MAX_NAME if self._role == "name" else None
        if limit is None:
            end = value.scan_value(text, position)
        else:
            latest = position + limit - self._num_chars
            end = position + value.scan_value(text[position:latest], 0)
            self._num_chars += end - position
        too_long = self._num_chars == limit and not value.done
        self._pieces.append(text[position:end])
        if self._streams(value):
            self._begin(*self._pieces)
            self._pieces = []
        if value.failed or too_long:
            self._fail()
        elif value.done:
            self._end_member()
        return end

    def _end_member(self) -> None:
        self._value = None
        if self._is_key:
            key = _string("".join(self._pieces))
            self._role = self._role_of(key)
            self._expected = ":"
            if self._strict and not self._role and key not in OTHER_MEMBERS:
                self._fail()
            return
        self._expected = ",}"
        if self._role == "name":
            self._end_name()
        elif self._role == "arguments" and not self.begun:
            self._end_arguments()

    def _role_of(self, key: str | None) -> Role:
        """The role of a member; a second one with the same role has none."""
        role: Role = "name" if key == "name" else "arguments" if key in ARGUMENT_MEMBERS else ""
        if role in self._roles:
            return ""
        self._roles.add(role)
        return role

    def _streams(self, value: JsonValue) -> bool:
        """Whether what has been read belongs to arguments that may be written now."""
        if self._is_key or self._role != "arguments" or self._name is None:
            return False
        return self.begun or (value.settled and self._pieces[0].startswith("{"))

    def _begin(self, *arguments: str) -> None:
        assert self._name is not None
        self._write_call(self._name, *arguments)

    def _end_name(self) -> None:
        name = _string("".join(self._pieces))
        if name is None or not CALLED_NAME.fullmatch(name) or not self._accepts(name):
            self._fail()
        else:
            self._name = name

    def _end_arguments(self) -> None:
        """Arguments that came before the name, or as a string of JSON, or as null."""
        text = "".join(self._pieces)
        if text.startswith('"'):
            text = _string(text) or ""
        if text == "null":
            text = "{}"
        try:
            whole = isinstance(orjson.loads(text), dict)
        except orjson.JSONDecodeError:
            whole = False
        if not whole:
            self._fail()
        elif self._name is not None:
            self._begin(text)
        else:
            self._arguments = text

    def _close(self) -> None:
        if not self.begun:
            if self._name is None or (self._arguments is None and self._strict):
                self._fail()
                return
            self._begin(self._arguments or "{}")
        self.done = True


class NamedCall(Call):
    """Reads the arguments, a JSON object, of a call whose name is known."""

    def __init__(self, writer: PartWriter, name: str, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(writer, new_id)
        self._name = name
        self._value = JsonValue()
        self._pieces: list[str] = []

    def read_call(self, text: str, start: int) -> int:
        end = self._value.scan_value(text, start)
        self._pieces.append(text[start:end])
        if self._value.settled:
            self._write_call(self._name, *self._pieces)
            self._pieces = []
        self.done = self._value.done
        if self._value.failed:
            self._fail()
        return end


def _string(text: str) -> str | None:
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, str) else None
