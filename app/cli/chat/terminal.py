"""Reading what the user types: with history and completion, over several lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HISTORY_LINES = 1000
BLOCK = '"""'
CONTINUED = "\\"
PROMPT, MORE = ">>> ", "... "
HISTORY_FILE = "chat_history"


def is_interactive() -> bool:
    return sys.stdin.isatty()


class Input:
    r"""Messages of the user; a context manager that keeps the history.

    A message is one line, or all between two lines with three quotation marks, or goes on after a line that ends
    with \. Lines that are pasted together are one message.
    """

    def __init__(self, commands: Sequence[str], *, history: bool) -> None:
        self._commands = list(commands)
        self._history = _history_file() if history else None
        self._readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None

    def __enter__(self) -> Input:
        if self._readline is not None:
            self._readline.set_completer_delims(" ")
            self._readline.set_completer(self._complete)
            self._readline.parse_and_bind("tab: complete")
            self._readline.set_history_length(HISTORY_LINES)
            if self._history is not None:
                with contextlib.suppress(OSError):
                    self._readline.read_history_file(str(self._history))
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is None or self._history is None:
            return
        with contextlib.suppress(OSError):  # a home that cannot be written costs the history alone
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            self._readline.write_history_file(str(self._history))

    def read(self) -> str:
        """The next message. Raises EOFError at the end of the input, KeyboardInterrupt after Ctrl-C."""
        line = self._line(PROMPT)
        if line.startswith(BLOCK):
            return self._block(line.removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith(CONTINUED):
            lines[-1] = lines[-1].removesuffix(CONTINUED)
            lines.append(self._line(MORE))
        return "\n".join(lines)

    def _block(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(self._line(MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self._readline is not None:
            return input(f"\x01\x1b[1m\x02{prompt}\x01\x1b[0m\x02" if "NO_COLOR" not in os.environ else prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _complete(self, text: str, state: int) -> str | None:
        found = [command for command in self._commands if text.startswith("/") and command.startswith(text)]
        return found[state] if state < len(found) else None


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # of a Python that was built without
        return None
    return readline


def _history_file() -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    state = Path(given) if os.path.isabs(given) else Path("~/.local/state").expanduser()
    return state / "tessera" / HISTORY_FILE
