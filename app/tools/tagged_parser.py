"""The base of formats that write each argument between tags of its own, its value as plain text."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from tessera.app.tools.call import CALLED_NAME
from tessera.app.tools.parser import State, ToolParser, ToolSchemas
from tessera.app.tools.parts import new_call_id
from tessera.app.tools.typed_arguments import TypedArguments


class TaggedParser(ToolParser):
    """A format adds the states that lead to a name, to a key and from there to `_value`, which goes back to `_body`.

    Attributes:
        value_end: the tag that ends a value.
    """

    value_end: ClassVar[str]

    def __init__(self, tools: ToolSchemas, *, max_calls: int | None = None) -> None:
        super().__init__(tools, max_calls=max_calls)
        self._source: list[str] = []  # what becomes content if it is no call
        self._label: list[str] = []  # of the name or key that is being read
        self._label_length = 0
        self._arguments = TypedArguments(self._writer, {})

    @property
    @abstractmethod
    def _unnamed_states(self) -> tuple[State, ...]:
        """Those in which the call is not known to be one."""

    @property
    @abstractmethod
    def _closable_states(self) -> tuple[State, ...]:
        """Those in which the call is whole if the text ends there."""

    @abstractmethod
    def _body(self, text: str, position: int) -> int:
        """The state after the name and after each argument."""

    def _begin_label(self, state: State) -> None:
        self._label = []
        self._label_length = 0
        self._state = state

    def _read_label(self, text: str, position: int, mark: str, limit: int) -> tuple[int, bool]:
        """Read a label on, up to a mark; -> where it ends so far, and whether the mark stands there."""
        latest = position + limit - self._label_length
        found = text.find(mark, position, latest + 1)
        end = min(latest, len(text)) if found < 0 else found
        self._label.append(text[position:end])
        self._label_length += end - position
        return end, found >= 0

    def _begin_call(self, name: str) -> None:
        """Begin the call and enter its body; give up where the name cannot be one."""
        if not CALLED_NAME.fullmatch(name):
            self._give_up()
            return
        self._arguments = TypedArguments(self._writer, self._tools.get(name, {}))
        self._writer.begin_call(name, new_call_id())
        self._state = self._body

    def _value(self, text: str, position: int) -> int:
        found = text.find(self.value_end, position)
        if found < 0:
            end = len(text) - self._hold_prefix(text, position, (self.value_end,))
            self._write_value(text[position:end])
            return len(text)
        self._write_value(text[position:found])
        self._arguments.end_value()
        self._state = self._body
        return found + len(self.value_end)

    def _write_value(self, text: str) -> None:
        self._arguments.write_value(text)

    def _close(self) -> None:
        self._arguments.close()
        self._call_ended()

    def _give_up(self) -> None:
        """Turn what looked like a call into content."""
        self._writer.write_content("".join(self._source))
        self._source = []
        self._state = self._content

    def _end(self, cut: bool) -> None:
        if self._state in self._unnamed_states:
            self._give_up()
        if self._state == self._content:
            self._writer.write_content(self._held)
        elif self._state == self._value:
            self._write_value(self._held)
            if cut:
                self._arguments.break_off()
            else:
                self._arguments.end_value()
                self._close()
        elif self._state in self._closable_states and not cut:
            self._close()
