"""Processor time that the machine withholds: by its hypervisor and by the container's quota."""

from __future__ import annotations

import os
from pathlib import Path

from tessera.engine.contract.machine import CGROUP

STAT = Path("/proc/stat")
CPU_STAT = CGROUP / "cpu.stat"
STEAL = 8  # the field of a `cpu` line
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


def withheld(stat: Path = STAT, cpu_stat: Path = CPU_STAT) -> tuple[float, float]:
    """Seconds since the machine's start that its cores were another's, and that the container's threads were stopped.

    Both are sums over cores; 0 where the machine does not say.
    """
    stolen = throttled = 0.0
    if stat.is_file():
        stolen = int(stat.read_text().split(maxsplit=STEAL + 1)[STEAL]) * TICK
    if cpu_stat.is_file():
        values = dict(line.split() for line in cpu_stat.read_text().splitlines())
        throttled = int(values.get("throttled_usec", 0)) / 10**6
    return stolen, throttled
