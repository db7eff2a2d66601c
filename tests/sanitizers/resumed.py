"""A pytest plugin, `-p tests.sanitizers.resumed`, whose files environment variables name.

COLLECTED gets all tests that were asked for. Of those in DONE_BEFORE, and of the cases of functions there, none runs.
Those that end well are added to DONE as they do. To FAILURES is added why others do not: a line of JSON each, so that a
run which is killed has said it, too. SECONDS gets how long each took, with setup and teardown on lines of their own,
STARTED when each has begun.

A tool keeps memory of the device for what a process has launched, and a report may cost the process its device. So a
process of pytest-xdist ends in front of its next test where the device has little memory left or does not answer, and
another one takes its place. PUT_OFF gets the tests that have not run for that.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tessera.engine.contract.errors import DeviceError
from tests.sanitizers.record import function_of

LEAST_FREE = 0.25  # of the device's memory: a test and its kernels have taken 27 GB
LONG = (  # tests of whole models, which come last: a run that is cut short has seen more tests then
    "tests/gpu/engine/",
    "tests/gpu/ranks/test_tensor_parallel_gpu.py",
    "tests/gpu/products/test_order_of_sums_gpu.py",
    "tests/gpu/training/test_pretraining_gpu.py",
    "tests/gpu/training/test_training_gpu.py",
)
USED_UP = pytest.StashKey[bool]()  # whether this process ends in front of its next test
FAILED: set[str] = set()


def file(name: str) -> Path:
    return Path(os.environ[name])


def lines(name: str) -> set[str]:
    return set(file(name).read_text().splitlines()) if file(name).exists() else set()


def add(name: str, line: str) -> None:
    with file(name).open("a") as added:
        added.write(f"{line}\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    before = lines("DONE_BEFORE")
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        file("COLLECTED").write_text("".join(f"{item.nodeid}\n" for item in items))
    done: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (done if before & {item.nodeid, function_of(item.nodeid)} else left).append(item)
    config.hook.pytest_deselected(items=done)
    items[:] = sorted(left, key=lambda item: item.nodeid.startswith(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and item.config.stash.get(USED_UP, False):
        add("PUT_OFF", item.nodeid)
        os._exit(1)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Other processes need the memory that this one keeps for later tests."""
    if "cuda_device" not in getattr(item, "fixturenames", ()):
        return
    device = getattr(item, "funcargs", {}).get("cuda_device")
    if device is None:  # there was no room for it
        item.config.stash[USED_UP] = True
        return
    try:
        device.empty_cache()
        item.config.stash[USED_UP] = device.free_memory() < LEAST_FREE * device.total_memory
    except DeviceError:
        item.config.stash[USED_UP] = True


def pytest_runtest_logstart(nodeid: str) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        add("STARTED", f"{time.time():.1f} {nodeid}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In one process alone: those of pytest-xdist send their reports to their parent."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    add("SECONDS", f"{report.duration:.1f} {report.nodeid}")
    if report.failed:
        if report.nodeid in lines("PUT_OFF"):
            return
        FAILED.add(report.nodeid)
        add("FAILURES", json.dumps({"test": report.nodeid, "account": report.longreprtext}))
    elif report.when == "teardown" and report.nodeid not in FAILED:
        add("DONE", report.nodeid)
