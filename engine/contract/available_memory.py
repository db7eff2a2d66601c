"""Memory of the machine that can still be had."""

from __future__ import annotations

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
