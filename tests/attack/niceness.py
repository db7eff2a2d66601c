"""The attack takes only the processor time that the server leaves, as if its clients were elsewhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Linux with autogroups shares each core out among sessions first: a process's niceness counts within its session alone.
SESSION = Path("/proc/self/autogroup")


@contextlib.contextmanager
def giving_way(niceness: int) -> Iterator[None]:
    """Lower the priority of this process for good, and that of its session for as long as the block takes.

    What is not to give way needs a session of its own.
    """
    before = _session_niceness()
    if niceness:
        os.nice(niceness)
        _set_session_niceness(niceness)
    try:
        yield
    finally:
        if niceness and before is not None:
            _set_session_niceness(before)


def _session_niceness() -> int | None:
    """None where sessions have none."""
    try:
        return int(SESSION.read_text().rpartition(" ")[2])  # /autogroup-25 nice 0
    except (OSError, ValueError):
        return None


def _set_session_niceness(niceness: int) -> None:
    with contextlib.suppress(OSError):
        SESSION.write_text(str(niceness))
