"""What cannot run beside other tests on the same card."""

from __future__ import annotations

import os

import pytest

measures_free_memory = pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1,
    reason="measures the card's free memory, which other tests change: run it without --numprocesses",
)
