"""The command `tessera`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tessera.app.cli.commands import COMMANDS, Command
from tessera.engine.contract.errors import ConfigError
from tessera.options.parser import EXIT_WRONG_USE, Parser
from tessera.options.suggestions import did_you_mean

EXIT_INTERRUPTED = 130
EPILOG = """Each option is also an environment variable (--{option}: {variable}) and a key of the --config FILE (the \
line {option}: {value}). The command line overrides the environment, the environment the file.

"""
HELP = "help"
OWN_FLAGS = ("-h", "--help", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the process's exit code: 0 after an orderly end, 1 after a fault, 2 for what the user can mend."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, parsers = build_parser()
    if words and words[0] == HELP:
        words = [*words[1:2], "--help"]
    if not words:
        parser.print_help()
        return 0
    if words[0] not in parsers and words[0] not in OWN_FLAGS:
        _refuse(parser, words)
    namespace, unknown = parser.parse_known_args(words)
    command: str = namespace.command
    if unknown:
        parsers[command].refuse(unknown, _other_flags(command))
    given = COMMANDS[command].options.read_or_exit(parsers[command], namespace, unknown, os.environ)
    try:
        return COMMANDS[command].run(given)
    except ConfigError as error:
        print(f"tessera: {error}", file=sys.stderr)
        return EXIT_WRONG_USE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _refuse(parser: Parser, words: Sequence[str]) -> NoReturn:
    """End with the error for words that do not begin with a command."""
    word = words[0]
    if word.startswith("-"):
        others = [command for command, flags in _flags().items() if word.partition("=")[0] in flags]
        if others:
            parser.error(f"{word} is an option of {_listed(others)}, and goes after the command")
        command = next((later for later in words if later in COMMANDS), None)
        parser.error(f"a command goes before its options{'' if command is None else f': tessera {command} {word}'}")
    if "/" in word or Path(word).exists():
        parser.error(f"{word!r} is no command; to serve a model: tessera serve {word}")
    parser.error(f"invalid choice: {word!r} (choose from {', '.join(COMMANDS)}){did_you_mean(word, COMMANDS)}")


def _flags() -> dict[str, set[str]]:
    """The flags of each command."""
    return {
        command.name: {f"--{name}" for declared in command.options.options for name in declared.names}
        for command in COMMANDS.values()
    }


def _other_flags(command: str) -> dict[str, str]:
    """Flags that another command has and this one lacks -> in words, which commands have them."""
    flags = _flags()
    own = flags.pop(command)
    return {
        flag: _listed([name for name, theirs in flags.items() if flag in theirs])
        for flag in set().union(*flags.values()) - own
    }


def _listed(commands: Sequence[str]) -> str:
    return " and ".join(f"tessera {command}" for command in commands)


class ShowVersion(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tessera import __version__

        print(f"tessera {__version__}")
        parser.exit()


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """-> the parser of `tessera`, and that of each command."""
    parser = Parser(
        prog="tessera",
        description="A small, fast OpenAI-compatible server for language models.",
        epilog="`tessera COMMAND --help` explains a command's options.",
    )
    parser.add_argument("--version", action=ShowVersion, help="show the version and exit")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    parsers: dict[str, Parser] = {}
    for command in COMMANDS.values():
        parsers[command.name] = added.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            usage=f"tessera {command.name} {command.usage}",
            epilog=_epilog(command),
        )
        command.options.add_to(parsers[command.name])
    return parser, parsers


def _epilog(command: Command) -> str:
    example = f"Example: {command.example}"
    if command.setting is None or command.options.prefix is None:
        return example
    option, value = command.setting
    variable = command.options.prefix + option.replace("-", "_").upper()
    return EPILOG.format(option=option, variable=variable, value=value) + example


if __name__ == "__main__":
    sys.exit(main())
