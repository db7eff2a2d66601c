"""A pytest plugin, `-p tests.sanitizers.resumed`: of the tests that a file names, which RESUMED says, none runs again,
and those that end well are added to it as they do.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def file() -> Path:
    return Path(os.environ["RESUMED"])


def done() -> set[str]:
    return set(file().read_text().splitlines()) if file().exists() else set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    before = done()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In one process alone: those of pytest-xdist send their reports to their parent."""
    ends_well = report.skipped or (report.passed and report.when == "call")
    if ends_well and "PYTEST_XDIST_WORKER" not in os.environ:
        with file().open("a") as added:
            added.write(f"{report.nodeid}\n")
