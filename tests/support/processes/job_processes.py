"""The processes that fine-tuning jobs run in, found by what they have open."""

from __future__ import annotations

import os
from pathlib import Path


def job_processes(folder: Path) -> list[int]:
    """Ids of the processes that have the lock file of a job below `folder` open."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                opened = [os.readlink(link) for link in (entry / "fd").iterdir()]
            except OSError:
                continue
            if any(path.startswith(f"{folder}/") and path.endswith("/lock") for path in opened):
                found.append(int(entry.name))
    return found
