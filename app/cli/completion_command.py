"""`tessera completion`: prints the completion script of a shell."""

from __future__ import annotations

import os
import sys
from pathlib import PurePath
from typing import get_args

from tessera.app.cli.completion.options import CompletionOptions, Shell
from tessera.app.cli.completion.scripts import CompletedCommand, completion_script
from tessera.engine.contract.errors import ConfigError
from tessera.options.command_options import GivenOptions

INSTALLATION = {
    "bash": 'add to ~/.bashrc: eval "$(tessera completion bash)"',
    "zsh": 'add to ~/.zshrc, after compinit: eval "$(tessera completion zsh)"',
    "fish": "run: tessera completion fish > ~/.config/fish/completions/tessera.fish",
}


def completion_command(given: GivenOptions) -> int:
    """-> exit code. Raises ConfigError: no shell is named, and $SHELL names none that is known."""
    from tessera.app.cli.commands import COMMANDS

    shell = given.make(CompletionOptions).shell or _own_shell()
    commands = [CompletedCommand(command.name, command.help, command.options) for command in COMMANDS.values()]
    print(completion_script(shell, commands), end="")
    if sys.stdout.isatty():
        print(f"To install it, {INSTALLATION[shell]}", file=sys.stderr)
    return 0


def _own_shell() -> Shell:
    name = PurePath(os.environ.get("SHELL", "")).name
    for shell in get_args(Shell):
        if name == shell:
            return shell  # type: ignore[no-any-return]
    raise ConfigError(f"completion: name the shell: {', '.join(get_args(Shell))}")
