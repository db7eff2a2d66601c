"""The table of rooms, from the floors that a test enforces and the docstrings of the packages."""

from __future__ import annotations

import ast
from pathlib import Path

from docs.generate.figures import markdown_table
from docs.generate.paths import ROOT
from docs.generate.schemas import cell
from tests.structure.floors import FLOORS

HEADINGS = {
    "app": "app: the HTTP service",
    "engine": "engine: inference",
    "loadtest": "loadtest: `tessera bench`",
    "tessera": "tessera: the package itself, and options",
}


def rooms_page() -> str:
    """A table for each package, rooms from the top floor to the bottom."""
    parts = [
        "# Rooms",
        "A room is a package with one purpose, or a module that stands alone. A room may import rooms on lower floors "
        "and nothing from its own floor or above; `tests/structure/test_rooms.py` reads every import and fails "
        "otherwise. This page is made from its table of floors and from the rooms' docstrings.",
    ]
    for package, heading in HEADINGS.items():
        rows = []
        for floor, rooms in enumerate(reversed(FLOORS)):
            for room in rooms:
                if room == package or room.startswith(package + "."):
                    rows.append((floor, room))
        rows.sort(key=lambda row: -row[0])
        table = [[f"`{room}`", str(floor), _files(room), _purpose(room)] for floor, room in rows]
        parts += [f"## {heading}", markdown_table(["room", "floor", "files", "purpose"], table, 4)]
    return "\n\n".join(parts) + "\n"


def _place(room: str) -> Path:
    folder = ROOT / room.replace(".", "/")
    return folder if folder.is_dir() else folder.with_suffix(".py")


def _files(room: str) -> str:
    place = _place(room)
    return str(len([path for path in place.glob("*.py") if path.name != "__init__.py"])) if place.is_dir() else "1"


def _purpose(room: str) -> str:
    place = _place(room)
    source = (place / "__init__.py" if place.is_dir() else place).read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return cell(docstring.replace("\n\n", " "))
