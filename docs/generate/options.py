"""The page of command-line options, from the command's own parser."""

from __future__ import annotations

import argparse
import html
from collections.abc import Iterator

from docs.generate.figures import markdown_table
from docs.generate.schemas import cell
from tessera.app.cli.command import build_parser


def options_page() -> str:
    return "\n\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "# Options"
    yield "This page is made from the command's own declarations; `tessera serve --help` prints the same."
    for name, parser in _commands().items():
        yield f"## tessera {name}"
        yield f"{parser.description}"
        for group in parser._action_groups:
            rows = [_row(action) for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
            if rows:
                title = group.title or ""
                yield f"### {title[:1].upper()}{title[1:]} {{ #{name}-{title.lower().replace(' ', '-')} }}"
                yield markdown_table(["option", "accepts", "meaning"], rows, 3)


def command_options() -> set[str]:
    """Every option of every command."""
    return {option for parser in _commands().values() for action in parser._actions for option in action.option_strings}


def _commands() -> dict[str, argparse.ArgumentParser]:
    (choice,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(choice.choices)


def _row(action: argparse.Action) -> list[str]:
    name = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.metavar or action.dest}`"
    if action.choices is not None:
        accepted = ", ".join(f"`{choice}`" for choice in action.choices)
    elif action.nargs == 0:
        accepted = ""
    else:
        accepted = f"{action.metavar or action.dest.upper()}"
    help_text = (action.help or "") % {"prog": "tessera", **vars(action)}
    return [name, cell(accepted), cell(html.escape(help_text, quote=False)).replace("*", "\\*")]
