"""Command lines: readable help, and errors of one sentence."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tessera.options.suggestions import did_you_mean

EXIT_WRONG_USE = 2
MAX_WIDTH = 110  # characters
HELP_POSITION = 32


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the paragraphs of a description or epilog apart."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
        super().__init__(prog, max_help_position=HELP_POSITION, width=width)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # the names of commands are indented once more
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(HelpFormatter, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage, and suggests names for mistyped ones."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_WRONG_USE, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str], elsewhere: Mapping[str, str] | None = None) -> NoReturn:
        """End with the error for arguments that this parser does not know.

        Args:
            elsewhere: flags of other commands, and which ones, in words.
        """
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        # No option is taken for its opposite mistyped.
        known = [
            name
            for name in self._option_string_actions
            if name.startswith("--") and (flag.startswith("--no") or not name.startswith("--no-"))
        ]
        positional = next((each for each in self._get_positional_actions() if f"--{each.dest}" == flag), None)
        if positional is not None:
            hint = f"; {positional.metavar or positional.dest} is given without {flag}"
        else:
            hint = f"; {flag} is an option of {elsewhere[flag]}" if elsewhere and flag in elsewhere else ""
        suggested = did_you_mean(flag, known) if flag and not hint else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint or suggested}")
