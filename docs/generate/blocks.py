"""Generated blocks in Markdown files: what stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docs.generate.clients import clients_table
from docs.generate.figures import TABLES
from docs.generate.models import models_table
from docs.generate.paths import DOCS, ROOT
from docs.generate.request_path import request_list
from docs.generate.routing import routing_table
from docs.generate.sanitizers import sanitizers_table
from docs.generate.sizing import TABLES as SIZING_TABLES

BLOCKS = {
    **TABLES,
    **SIZING_TABLES,
    "request-path": request_list,
    "clients": clients_table,
    "models": models_table,
    "routing": routing_table,
    "sanitizers": sanitizers_table,
}
BLOCK = re.compile(r"(<!-- begin: (?P<name>[\w-]+) -->\n).*?(<!-- end: (?P=name) -->)", re.DOTALL)


def markdown_files() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted(DOCS.rglob("*.md"))


def filled(text: str) -> str:
    """The text with every block as it should be. Raises KeyError for a name that no block has."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match['name']]()}\n{match[3]}", text)
