"""Memory and cores that the machine, or the container, leaves to this process."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes that can still be had: the machine's, or what the container's limit leaves; None if that is not known.

    Pages that cache files count as available, because the kernel gives them up first.
    """
    found = []
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                found.append(int(value.split()[0]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    try:
        most = (cgroup / "memory.max").read_text().strip()
        if most != "max":
            used = int((cgroup / "memory.current").read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
            found.append(int(most) - used + cached)
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def num_cores(cgroup: Path = CGROUP) -> int:
    """Whole cores that this process may use: the machine's, or what a container's quota leaves; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def core_quota(cgroup: Path = CGROUP) -> float | None:
    """Cores' worth of time that the container may take; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
