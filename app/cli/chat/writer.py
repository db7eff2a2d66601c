"""Text on the terminal as it streams: wrapped between words, without control characters."""

from __future__ import annotations

import re
from typing import TextIO

from rich.cells import cell_len

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline: a model must not move the cursor
PARTS = re.compile(r"\n|[ \t]+|[^ \t\n]+")
FENCE = "```"
DIM, RESET = "\x1b[2m", "\x1b[0m"


class StreamWriter:
    """Writes pieces of text. A word is held back until it is whole, where lines are wrapped.

    Args:
        width: columns of the terminal; None: lines are not wrapped.
        styled: whether escape sequences may be written.
    """

    def __init__(self, stream: TextIO, width: int | None, *, styled: bool) -> None:
        self._stream = stream
        self._width = width
        self._styled = styled
        self._column = 0
        self._word = ""
        self._space = ""
        self._line = ""
        self._long_word = False
        self._in_code = False
        self._dim = False

    def write(self, text: str, *, dim: bool = False) -> None:
        text = CONTROL.sub("", text)
        if dim != self._dim:
            self.flush()
            self._dim = dim
            if self._styled:
                self._stream.write(DIM if dim else RESET)
        if self._width is None:
            self._stream.write(text)
            self._stream.flush()
            return
        for part in PARTS.findall(text):
            if part == "\n":
                self._end_word()
                self._new_line()
            elif part.isspace():
                self._end_word()
                self._space += part
            else:
                self._word += part
                if len(self._word) >= self._width:
                    self._end_word()
        self._stream.flush()

    def flush(self) -> None:
        """Write what is held back."""
        self._end_word()
        self._stream.flush()

    def end(self) -> None:
        """End the text: with a newline, in the usual style."""
        self.flush()
        if self._dim and self._styled:
            self._stream.write(RESET)
        self._dim = False
        self._stream.write("\n")
        self._stream.flush()
        self._column, self._line, self._space, self._in_code = 0, "", "", False

    def _end_word(self) -> None:
        if not self._word:
            return
        assert self._width is not None
        needed = cell_len(self._space) + cell_len(self._word)
        begun = self._long_word and not self._space  # a word longer than a line is left to the terminal
        if self._column and not self._in_code and not begun and self._column + needed > self._width:
            self._stream.write("\n")
            self._column, self._space = 0, ""
        self._stream.write(self._space + self._word)
        self._column += cell_len(self._space) + cell_len(self._word)
        self._long_word = begun or len(self._word) >= self._width
        self._line += self._space + self._word
        self._space = self._word = ""

    def _new_line(self) -> None:
        if self._line.lstrip().startswith(FENCE):
            self._in_code = not self._in_code
        self._stream.write("\n")
        self._column, self._line, self._space = 0, "", ""
