"""A process whose device a test has cost ends in front of its next test, as every call answers with the error of a
kernel that has ended. pytest-xdist starts another one, and calls the next test crashed; else all behind it would fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
from cuda.bindings import driver

LOST = pytest.StashKey[bool]()
# What a process answers that has no context, or no memory for a test: the next one may do better.
HARMLESS = frozenset(
    getattr(driver.CUresult, f"CUDA_{name}")
    for name in ("SUCCESS", "ERROR_NOT_INITIALIZED", "ERROR_INVALID_CONTEXT", "ERROR_OUT_OF_MEMORY")
)


def device_is_lost() -> bool:
    try:
        (status,) = driver.cuCtxSynchronize()
    except RuntimeError:  # how cuda.bindings says that there is no driver
        return False
    return status not in HARMLESS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ:
        item.config.stash[LOST] = item.config.stash.get(LOST, False) or device_is_lost()
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.stash.get(LOST, False):
        print(f"\nthe device is lost: this process ends in front of {item.nodeid}", file=sys.__stderr__, flush=True)
        os._exit(1)
