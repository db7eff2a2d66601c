"""A server that is killed again and again, at moments that a seed decides, and started again on the same data."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

from tests.support.paths import ROOT

START_DEADLINE = 300.0  # seconds
MODULES = {"engine": "tessera.engine.ipc.process", "worker": "tessera.app.server.worker"}
TARGETS = ("server", "engine", "engine", "worker")  # as often as they occur


class MortalServer:
    """Attributes:
    url: where it listens, the same after each start.
    kills: how often each kind of process was killed.
    """

    def __init__(self, model: Path, data_dir: Path, log_file: Path, arguments: tuple[str, ...] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.kills: Counter[str] = Counter()
        self._command = [
            *(sys.executable, "-m", "tessera.app.cli.command", "serve", str(model), "--device", "cpu"),
            *("--dtype", "float32", "--port", str(port), "--data-dir", str(data_dir), *arguments),
        ]
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._killer: threading.Thread | None = None

    def start(self) -> None:
        """Start it and wait until it serves, again where it ends at once.

        A worker that was itself being started may listen for a moment more.
        """
        end = time.monotonic() + START_DEADLINE
        while time.monotonic() < end:
            self._launch()
            if self._wait_ready(end):
                return
        raise RuntimeError(f"the server did not start; see {self._log_file}")

    def _launch(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TESSERA_API_KEY"}
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        """Kill the first process; the others end with it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _wait_ready(self, end: float) -> bool:
        """Whether it serves, rather than has ended."""
        assert self._process is not None
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return True
            time.sleep(0.2)
        return False

    def begin_killing(self, seed: int, shortest: float, longest: float) -> None:
        """Kill one process after the other, with pauses of so many seconds."""
        self._killer = threading.Thread(target=self._kill, args=(random.Random(seed), shortest, longest))
        self._killer.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._killer is not None:
            self._killer.join()
        if self._process is not None:
            self.kill()

    def _kill(self, rng: random.Random, shortest: float, longest: float) -> None:
        while not self._stopping.wait(rng.uniform(shortest, longest)):
            target = rng.choice(TARGETS)
            if target == "server":
                self.kill()
                self.kills[target] += 1
                self.start()
                continue
            children = self.children(target)
            if children:  # it may be about to be started again
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(children), signal.SIGKILL)
                    self.kills[target] += 1

    def children(self, kind: str) -> list[int]:
        """Ids of the processes of a kind, `engine` or `worker`."""
        assert self._process is not None
        pid, module = self._process.pid, MODULES[kind]
        found = []
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if module in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                    found.append(int(child))
        return sorted(found)
