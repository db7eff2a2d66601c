"""Checks of the machine besides its GPU: processor, memory, disks, limits, ports."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tessera.app.cli.cache.units import size
from tessera.app.cli.doctor.check import Check, Status
from tessera.app.cli.doctor.folders import folder_check
from tessera.engine.contract.machine import core_quota, num_cores

GROUP = "machine"
MIN_DESCRIPTORS = 4096
MIN_MEMORY = 2 * 10**9  # bytes available: the processes alone take half of it
MIN_SHARED = 16 * 2**20
MAX_RUN_FOLDER = 60  # characters; the name of a Unix socket, with its file in it, has at most 107
KUBERNETES_MEMORY = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_checks(host: str, ports: Sequence[int]) -> list[Check]:
    return [
        _python(),
        _cpu(),
        _memory(),
        _shared_memory(),
        _temporary(),
        _descriptors(),
        *(_port(host, port) for port in ports),
    ]


def _python() -> Check:
    value = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Check(GROUP, "Python", "warning", value, "Linux is what Tessera is tested on")
    return Check(GROUP, "Python", "ok", value)


def _cpu() -> Check:
    cores, quota = num_cores(), core_quota()
    name = _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    limited = "" if quota is None else f", limited to {quota:g} by the container"
    status: Status = "ok" if cores >= 2 else "warning"
    advice = "" if cores >= 2 else "HTTP work and the engine share one core"
    return Check(GROUP, "CPU", status, f"{name}, {cores} cores{limited}", advice)


def _memory() -> Check:
    total, available = (_kilobytes("/proc/meminfo", name) for name in ("MemTotal", "MemAvailable"))
    if total is None or available is None:
        return Check(GROUP, "memory", "ok", "not known on this system")
    limits = [int(text) for text in map(_read, KUBERNETES_MEMORY) if text.strip().isdigit()]
    limit = min(limits, default=total)
    limited = f", limited to {size(limit)} by the container" if limit < total else ""
    value = f"{size(total)}, {size(available)} available{limited}"
    if min(available, limit) < MIN_MEMORY:
        return Check(GROUP, "memory", "warning", value, "end other programs, or take a smaller model")
    return Check(GROUP, "memory", "ok", value)


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    found = folder_check(GROUP, "shared memory", folder, "`tessera bench` needs it; docker run --shm-size 1g")
    if found.status != "ok":
        return found
    stat = os.statvfs(folder)
    total = stat.f_blocks * stat.f_frsize
    if total < MIN_SHARED:
        return Check(GROUP, "shared memory", "warning", f"{folder}, {size(total)}", "docker run --shm-size 1g")
    return Check(GROUP, "shared memory", "ok", f"{folder}, {size(total)}")


def _temporary() -> Check:
    """Of the sockets between the server's processes."""
    folder = Path(tempfile.gettempdir())
    if len(os.fsencode(folder)) > MAX_RUN_FOLDER:
        return Check(GROUP, "temporary files", "error", f"{folder} has too long a path for sockets", "set TMPDIR")
    found = folder_check(GROUP, "temporary files", folder, "set TMPDIR")
    return found if found.status == "ok" else Check(GROUP, found.name, "error", found.value, found.advice)


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 2**20
    value = f"{soft:,}, which the server raises to {most:,}" if soft != hard else f"{most:,}"
    if most < MIN_DESCRIPTORS:
        return Check(GROUP, "descriptors", "warning", value, "each connection takes one: raise it with ulimit -Hn")
    return Check(GROUP, "descriptors", "ok", value)


def _port(host: str, port: int) -> Check:
    name = f"port {port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return Check(GROUP, name, "warning", f"{host}: {error.strerror or error}", "choose another with --port")
    return Check(GROUP, name, "ok", f"free at {host}")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _field(path: str, name: str) -> str | None:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _kilobytes(path: str, name: str) -> int | None:
    """Bytes."""
    words = (_field(path, name) or "").split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None
