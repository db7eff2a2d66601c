"""The documentation of a command's options, in Markdown."""

from __future__ import annotations

import re

from tessera.options.command_options import CommandOptions
from tessera.options.declaration import DeclaredOption
from tessera.options.values import bounds_text

HEADER = "| option | environment | accepts | default | meaning |\n|---|---|---|---|---|"


def render_reference(command: CommandOptions) -> str:
    """A table for each group of options, below headings of level 3."""
    return "\n\n".join(
        f"### {title[0].upper()}{title[1:]}\n\n"
        + "\n".join([HEADER, *(_row(command, declared) for declared in options)])
        for title, options in command.groups.items()
        if options
    )


def _row(command: CommandOptions, declared: DeclaredOption) -> str:
    names = [f"`{name}`" for name in (declared.flag, *(f"--{alias}" for alias in declared.option.aliases))]
    if declared.rule.kind == "switch":
        names.append(f"`--no-{declared.name}`")
    cells = (
        ", ".join(names),
        f"`{command.variable(declared)}`" if command.prefix is not None else "",
        _accepted(declared),
        _default(declared),
        _sentence(declared.option.help),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _accepted(declared: DeclaredOption) -> str:
    option, rule = declared.option, declared.rule
    if option.parse is not None and rule.form:
        text = rule.form
    elif rule.kind == "switch":
        text = "true, false"
    elif rule.kind == "choice":
        text = ", ".join(f"`{choice}`" for choice in rule.choices)
    elif rule.kind in ("integer", "number"):
        text = bounds_text(rule)
    elif rule.form:
        text = rule.form
    elif rule.kind == "object":
        text = "a JSON object"
    else:
        text = f"`{option.metavar or declared.name.upper()}`"
    return f"{text}; several" if declared.many else text


def _default(declared: DeclaredOption) -> str:
    text = declared.default_text
    if not text:
        return ""
    return text if declared.option.default is not None else f"`{text}`"


def _sentence(text: str) -> str:
    """Help as a table's cell: tags in it are not HTML."""
    return re.sub(r"<(\S+?)>", r"`<\1>`", text)
