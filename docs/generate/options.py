"""The page of options: the command's own reference, with each environment variable below its option."""

from __future__ import annotations

from tessera.app.cli.reference import render_page

CELLS = " | "  # a bar inside a cell is escaped, so it has no space before it


def options_page() -> str:
    return "\n".join(map(_narrow, render_page().splitlines())) + "\n"


def _narrow(line: str) -> str:
    """A row of five columns as one of three, which fits the page."""
    cells = line.strip("| ").split(CELLS) if line.startswith("|") else []
    if line == "|---|---|---|---|---|":
        return "|---|---|---|"
    if len(cells) != 5:
        return line
    option, variable, accepted, default, meaning = cells
    if option == "option":
        return "| option | accepts | meaning |"
    default = f"<br>default: {default}" if default else ""
    return f"| {option}<br>{variable} | {accepted}{default} | {meaning} |"
