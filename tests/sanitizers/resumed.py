"""A pytest plugin, `-p tests.sanitizers.resumed`: of the tests that a file names, which RESUMED says, none runs again,
and those that end well are added to it as they do. To the file that FAILURES says is added why others do not: a line of
JSON each, so that a run which is killed has said it, too.
"""

from __future__ import annotations

import json
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
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.failed:
        with Path(os.environ["FAILURES"]).open("a") as added:
            added.write(json.dumps({"test": report.nodeid, "account": report.longreprtext}) + "\n")
    elif report.skipped or report.when == "call":
        with file().open("a") as added:
            added.write(f"{report.nodeid}\n")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Other processes need the memory that this one keeps for later tests."""
    device = getattr(item, "funcargs", {}).get("cuda_device")
    if device is not None:
        device.empty_cache()
