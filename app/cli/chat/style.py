"""Styles of what the chat itself says; the answer's text alone goes to a pipe."""

from __future__ import annotations

import os
import sys

from tessera.app.cli.chat.writer import CONTROL, DIM, RESET

RED = "\x1b[31m"


class Style:
    """Lines of the chat besides answers.

    Attributes:
        on_terminal: answers go to a terminal.
        colours: escape sequences may be written there (https://no-color.org).
    """

    def __init__(self) -> None:
        self.on_terminal = sys.stdout.isatty()
        self.colours = self.on_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def note(self, text: str) -> None:
        """A dim line; to standard error where answers go to a pipe."""
        text = CONTROL.sub("", text)
        stream = sys.stdout if self.on_terminal else sys.stderr
        print(f"{DIM}{text}{RESET}" if self.colours else text, file=stream, flush=True)

    def error(self, text: str) -> None:
        text = CONTROL.sub("", text)
        coloured = self.colours and sys.stderr.isatty()
        print(f"{RED}{text}{RESET}" if coloured else text, file=sys.stderr, flush=True)
