"""The table of the suite: checks by client, what failed, and what a check has to say of a client's limits."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import pytest

from tests.clients.catalogue import CLIENTS
from tests.support.checkout import current_commit
from tests.support.paths import ROOT

FIGURES = ROOT / "docs" / "figures" / "clients.json"
COLUMNS = ("client", "version", "checks", "passed", "left")
HEADER = (*COLUMNS[:-1], "what is left and why")
NOTE = "note"


@dataclass
class Tally:
    """The checks of one client."""

    checks: int = 0
    passed: int = 0
    left: list[str] = field(default_factory=list)


TALLIES = pytest.StashKey[dict[str, Tally]]()
PARTS = pytest.StashKey[set[str]]()  # clients with checks that were not chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", action="store_true", help="write to docs/figures/clients.json the clients all of whose checks ran"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "client(name): the client that a check is of")
    config.stash[TALLIES] = defaultdict(Tally)
    config.stash[PARTS] = set()


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash[PARTS].add(client_of(item))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if CLIENTS[client_of(item)].version is None:
        pytest.skip("make test-clients installs the packages")


def client_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("client")
    assert marker is not None, f"{item.nodeid} is of no client"
    return str(marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        tally = item.config.stash[TALLIES][client_of(item)]
        tally.checks += 1
        tally.passed += report.passed
        if report.failed:
            tally.left.append(f"failed: {item.name}")
        if report.skipped:
            tally.left.append(f"not run: {item.name}")
        tally.left += [str(text) for name, text in item.user_properties if name == NOTE]
    return report


def rows(tallies: dict[str, Tally]) -> list[dict[str, Any]]:
    return [
        {
            "client": name,
            "version": client.version or "not installed",
            "checks": tallies[name].checks,
            "passed": tallies[name].passed,
            "left": "; ".join(filter(None, dict.fromkeys([*tallies[name].left, client.left]))),
        }
        for name, client in CLIENTS.items()
        if name in tallies
    ]


def table(found: Iterable[dict[str, Any]]) -> list[str]:
    cells = [HEADER, *(tuple(str(row[name]) for name in COLUMNS) for row in found)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    return [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = rows(config.stash[TALLIES])
    if not found:
        return
    terminalreporter.section("clients")
    for line in table(found):
        terminalreporter.line(line)
    if config.getoption("--record"):
        record([row for row in found if row["client"] not in config.stash[PARTS]])


def record(found: list[dict[str, Any]]) -> None:
    """Replace the rows of these clients."""
    run = {"commit": current_commit(), "date": date.today().isoformat()}
    kept = {row["client"]: row for row in json.loads(FIGURES.read_text())["rows"]}
    kept |= {row["client"]: {**row, **run} for row in found}
    lines = ",\n".join(f"  {json.dumps(kept[name], ensure_ascii=False)}" for name in CLIENTS if name in kept)
    FIGURES.write_text(f'{{\n "command": "make test-clients",\n "rows": [\n{lines}\n ]\n}}\n')
