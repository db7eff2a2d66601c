"""The server under attack: a process of its own, and what it and its children hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attack.findings import Usage
from tests.attack.wire import Wire
from tests.support.paths import ROOT

START_TIMEOUT = 300.0  # seconds; a GPU's kernels may have to be compiled
NUM_DESCRIPTORS = 1024  # few enough that an attack can take them all
ATTACKER, CANARY = "sk-attacker", "sk-canary"
ENGINE = "tessera.engine.ipc.process"
WORKER = "tessera.app.server.worker"
TRACEBACK = "Traceback (most recent call last)"
STALL = re.compile(r".*was held up for (\d+) ms.*\((\d+) ms of its own\).*")


def serve_command(model: str | None, folder: Path, *arguments: str) -> list[str]:
    """`tessera serve` with keys for the attacker and for the canaries."""
    keys = folder / "keys"
    keys.write_text(f"{ATTACKER}\n{CANARY}\n")
    command = [sys.executable, "-m", "tessera.app.cli.command", "serve", *([model] if model else [])]
    command += ["--device", "cpu", "--dtype", "float32", "--port", "0", "--admin-port", "0"]
    return [*command, "--api-key-file", str(keys), "--log-level", "warning", *arguments]


@dataclass
class Target:
    """A running server. `admin` is None where it has no such port."""

    process: subprocess.Popen[bytes]
    log_file: Path
    host: str
    port: int
    admin_port: int | None

    @property
    def wire(self) -> Wire:
        return Wire(self.host, self.port)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def children(self, module: str) -> list[int]:
        """Ids of the descendants that run this module."""
        return [pid for pid in descendants(self.process.pid) if module in command_line(pid)]

    def own_pids(self) -> list[int]:
        """Ids of the processes that stay; probes of grammars and renderers come and go by design."""
        return [self.process.pid, *self.children(ENGINE), *self.children(WORKER)]

    def memories(self) -> dict[str, int]:
        """Resident bytes of each process that stays, by its part in the server."""
        named = [("main", [self.process.pid]), ("engine", self.children(ENGINE)), ("worker", self.children(WORKER))]
        return {f"{name} {number}": memory_of(pid) for name, pids in named for number, pid in enumerate(pids)}

    def stalls(self) -> list[tuple[float, str]]:
        """(own seconds, line) of what the server has logged."""
        found = []
        for line in self.log().splitlines():
            if match := STALL.match(line):
                found.append((int(match[2]) / 1000, line))
        return found

    async def usage(self, timeout: float) -> Usage:
        """What it holds once it is quiet, or after `timeout` seconds."""
        end = time.monotonic() + timeout
        usage = await self._look()
        while time.monotonic() < end:
            await asyncio.sleep(0.2)
            later = await self._look()
            if later == usage and later.blocks == 0:
                break
            usage = later
        return usage

    async def blocks(self, state: str) -> int:
        """KV blocks in a state: used, cached or free; 0 where the server does not say."""
        answer = await self.wire.get("/metrics", key=CANARY)
        found = 0.0
        for line in answer.body.decode().splitlines():
            if line.startswith("tessera:kv_cache_blocks{") and f'state="{state}"' in line:
                found = float(line.rpartition(" ")[2])
        return int(found)

    async def _look(self) -> Usage:
        used = await self.blocks("used")
        pids = self.own_pids()
        return Usage(
            memory=sum(map(memory_of, pids)) // 2**20 * 2**20,
            descriptors=sum(map(num_descriptors, pids)),
            processes=len(pids),
            blocks=used,
        )


@contextlib.contextmanager
def running(command: Sequence[str], folder: Path, *, tmpdir: Path | None = None) -> Iterator[Target]:
    """Start a server, wait until it says where it is ready, and end it with the block."""
    log_file = folder / "server.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    environment |= {"TMPDIR": str(tmpdir)} if tmpdir is not None else {}
    environment["TESSERA_DATA_DIR"] = str((tmpdir or folder) / "data")
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=environment,
            preexec_fn=_limit_descriptors,
            start_new_session=True,  # the attack's session gives way
        )
    try:
        yield _await_ready(process, log_file)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _limit_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = NUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(NUM_DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _await_ready(process: subprocess.Popen[bytes], log_file: Path) -> Target:
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end and process.poll() is None:
        log = log_file.read_text()
        if found := re.search(r"Ready on http://([\d.]+):(\d+)", log):
            admin = re.search(r"operators are on http://[\d.]+:(\d+)", log)
            return Target(process, log_file, found[1], int(found[2]), int(admin[1]) if admin else None)
        time.sleep(0.02)
    raise RuntimeError(f"the server did not start:\n{log_file.read_text()}")


def descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield int(child)
                yield from descendants(int(child))


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def memory_of(pid: int) -> int:
    """Resident bytes."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def num_descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
