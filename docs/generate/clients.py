"""The table of clients, from `docs/figures/clients.json`, which `make test-clients ARGS=--record` writes."""

from __future__ import annotations

import json
from typing import Any

from docs.generate.figures import markdown_table
from docs.generate.paths import FIGURES

COLUMNS = ("client", "version", "checks", "passed", "what is left and why")


def clients_table() -> str:
    run: dict[str, Any] = json.loads((FIGURES / "clients.json").read_text())
    rows = [[str(row[name]) for name in ("client", "version", "checks", "passed", "left")] for row in run["rows"]]
    runs = ", ".join(sorted({f"{row['commit']} ({row['date']})" for row in run["rows"]}))
    return f"{markdown_table(COLUMNS, rows, len(COLUMNS))}\n\n*`{run['command']}`, commit {runs}.*"
