"""The completion scripts of bash, zsh and fish."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tessera.app.cli.completion.options import Shell
from tessera.options.command_options import CommandOptions
from tessera.options.declaration import DeclaredOption

FILE_METAVARS = ("FILE", "FOLDER")
MODEL_METAVAR = "MODEL"
MODEL_NAMES = "command tessera list --names 2>/dev/null"


class CompletedCommand(NamedTuple):
    """A command as shells complete it."""

    name: str
    help: str
    options: CommandOptions


def completion_script(shell: Shell, commands: Sequence[CompletedCommand]) -> str:
    """The script's text; it asks `tessera list` for the names of models."""
    return SCRIPTS[shell](commands)


def _flags(declared: DeclaredOption) -> list[str]:
    """With dashes; of a switch those that change its default."""
    names = list(declared.names)
    if declared.rule.kind == "switch":
        opposite = [f"no-{name}" for name in names]
        names = opposite if declared.default is True else names if declared.default is False else names + opposite
    return [f"--{name}" for name in names]


def _choices(declared: DeclaredOption) -> list[str]:
    return [str(choice) for choice in declared.rule.choices]


def _names_file(declared: DeclaredOption) -> bool:
    return declared.rule.kind == "path" or declared.option.metavar in FILE_METAVARS


def _flagged(command: CompletedCommand) -> Iterator[DeclaredOption]:
    return (declared for declared in command.options.options if not declared.option.positional)


def _positional(command: CompletedCommand) -> list[DeclaredOption]:
    return [declared for declared in command.options.options if declared.option.positional]


# -- bash --------------------------------------------------------------------------------------------------------


def _bash(commands: Sequence[CompletedCommand]) -> str:
    cases = "".join(_bash_case(command) for command in commands)
    names = " ".join(command.name for command in commands)
    return f"""\
# bash completion of tessera
_tessera() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= options= operands= value i
  [[ $cur == = ]] && cur=
  [[ $prev == = ]] && prev=${{COMP_WORDS[COMP_CWORD-2]}}
  for ((i = 1; i < COMP_CWORD; i++)); do
    case ${{COMP_WORDS[i]}} in
      -*) ;;
      help) ;;
      *) command=${{COMP_WORDS[i]}}; break ;;
    esac
  done
  COMPREPLY=()
  value=none
  case $command in
    "") options="{names} help --help --version" ;;
{cases}  esac
  case $value in
    files) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$cur")); return ;;
    any) return ;;
    none) ;;
    *) COMPREPLY=($(compgen -W "$value" -- "$cur")); return ;;
  esac
  if [[ $cur == -* || -z $command ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$cur"))
  elif [[ $operands == models ]]; then
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -W "$({MODEL_NAMES})" -- "$cur") $(compgen -f -- "$cur"))
  else
    COMPREPLY=($(compgen -W "$operands" -- "$cur"))
  fi
}}
complete -F _tessera tessera
"""


def _bash_case(command: CompletedCommand) -> str:
    options, values = ["--help"], []
    for declared in _flagged(command):
        flags = _flags(declared)
        options += flags
        if declared.rule.kind != "switch":
            value = "files" if _names_file(declared) else " ".join(_choices(declared)) or "any"
            values.append(f"        {'|'.join(flags)}) value={shlex.quote(value)} ;;\n")
    return (
        f"    {command.name})\n      options={shlex.quote(' '.join(options))}\n"
        f"      operands={shlex.quote(_operands(command))}\n      case $prev in\n{''.join(values)}      esac ;;\n"
    )


def _operands(command: CompletedCommand) -> str:
    """`models`, or the words that a command takes without a flag."""
    positional = _positional(command)
    if any(declared.option.metavar == MODEL_METAVAR for declared in positional):
        return "models"
    return " ".join(choice for declared in positional for choice in _choices(declared))


# -- zsh ---------------------------------------------------------------------------------------------------------


def _zsh(commands: Sequence[CompletedCommand]) -> str:
    described = " ".join(shlex.quote(f"{command.name}:{command.help}") for command in commands)
    cases = "".join(_zsh_case(command) for command in commands)
    return f"""\
#compdef tessera
# zsh completion of tessera
_tessera_models() {{
  local -a models
  models=(${{(f)"$({MODEL_NAMES})"}})
  _alternative 'models:model:compadd -a models' 'files:file:_files'
}}
_tessera() {{
  local -a commands
  commands=({described})
  if (( CURRENT == 2 )); then
    if [[ $words[2] == -* ]]; then
      _arguments '--help[show help]' '--version[show the version]'
    else
      _describe command commands
    fi
    return
  fi
  local command=$words[2]
  shift words
  (( CURRENT-- ))
  case $command in
    help) _describe command commands ;;
{cases}  esac
}}
compdef _tessera tessera
"""


def _zsh_case(command: CompletedCommand) -> str:
    specs = ["'--help[show help]'"]
    for declared in _flagged(command):
        repeat = "*" if declared.many else ""
        for flag in _flags(declared):
            value = "" if declared.rule.kind == "switch" else f":{_zsh_text(_metavar(declared))}:{_zsh_value(declared)}"
            specs.append(_zsh_quoted(f"{repeat}{flag}[{_zsh_text(declared.option.help)}]{value}"))
    for declared in _positional(command):
        place = "*" if declared.many else ""
        action = "_tessera_models" if declared.option.metavar == MODEL_METAVAR else _zsh_value(declared)
        specs.append(_zsh_quoted(f"{place}:{_zsh_text(_metavar(declared))}:{action}"))
    lines = " \\\n        ".join(specs)
    return f"    {command.name})\n      _arguments \\\n        {lines} ;;\n"


def _zsh_value(declared: DeclaredOption) -> str:
    choices = _choices(declared)
    return f"({' '.join(choices)})" if choices else "_files" if _names_file(declared) else " "


def _zsh_text(text: str) -> str:
    """Without the characters that have a meaning in a specification."""
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _metavar(declared: DeclaredOption) -> str:
    return declared.option.metavar or declared.name.upper()


# -- fish --------------------------------------------------------------------------------------------------------


def _fish(commands: Sequence[CompletedCommand]) -> str:
    lines = [
        "# fish completion of tessera",
        "complete -c tessera -f",
        "complete -c tessera -n __fish_use_subcommand -l version -d 'show the version'",
        "complete -c tessera -l help -d 'show help'",
    ]
    for command in commands:
        lines.append(f"complete -c tessera -n __fish_use_subcommand -a {command.name} -d {_fish_quoted(command.help)}")
        seen = f"complete -c tessera -n '__fish_seen_subcommand_from {command.name}'"
        for declared in _flagged(command):
            for flag in _flags(declared):
                lines.append(
                    f"{seen} -l {flag.removeprefix('--')}{_fish_value(declared)} "
                    f"-d {_fish_quoted(declared.option.help)}"
                )
        operands = _operands(command)
        if operands == "models":
            lines.append(f"{seen} -F -a '({MODEL_NAMES})'")
        elif operands:
            lines.append(f"{seen} -a {_fish_quoted(operands)}")
    return "\n".join(lines) + "\n"


def _fish_value(declared: DeclaredOption) -> str:
    if declared.rule.kind == "switch":
        return ""
    choices = _choices(declared)
    return f" -x -a {_fish_quoted(' '.join(choices))}" if choices else " -r -F" if _names_file(declared) else " -x"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: Mapping[Shell, Callable[[Sequence[CompletedCommand]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
