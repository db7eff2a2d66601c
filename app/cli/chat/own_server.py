"""A server that is started for the chat on a port of the loopback, and ended with it."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tessera.app.cli.hub import ModelFolder
from tessera.engine.contract.errors import ConfigError

READY = re.compile(r"Ready on (http://\S+)")
KEPT_LINES = 20
STOP_SECONDS = 10.0
SIGNAL_AT_PARENTS_END = 1  # PR_SET_PDEATHSIG of prctl(2)


class OwnServer:
    """`tessera serve` as a child process; a context manager.

    Attributes:
        url: where it listens, once ready.
        api_key: that it asks for: other users of the machine may reach the port.
    """

    def __init__(self, model: ModelFolder, arguments: str, on_line: Callable[[str], None]) -> None:
        """A server of this model; entering the context starts it.

        Args:
            arguments: further options of `tessera serve`.
            on_line: gets the lines that it prints until it is ready.

        Raises: ConfigError: `arguments` are no words of a shell.
        """
        try:
            words = shlex.split(arguments)
        except ValueError as error:
            raise ConfigError(f"--server-args: {error}") from None
        self.api_key = secrets.token_urlsafe(24)
        self.url = ""
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        own = ["--host", "127.0.0.1", "--port", "0", "--drain-timeout", "1", "--data-dir", "none", "--no-ui"]
        command = [sys.executable, "-m", "tessera", "serve", str(model.path), "--served-model-name", model.name]
        self._command = [*command, *own, "--log-level", "warning", "--log-format", "text", *words]

    def __enter__(self) -> OwnServer:
        """Start it and wait until it is ready. Raises ConfigError with its last words where it ends before."""
        environment = {**os.environ, "TESSERA_API_KEY": self.api_key, "NO_COLOR": "1"}
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C ends an answer, not the server
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        self._reader = threading.Thread(target=self._keep_reading, daemon=True)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        self._reader.start()
        return self

    def _wait_until_ready(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip())
            found = READY.search(line)
            if found is not None:
                self.url = found[1]
                return
            self._on_line(line.strip())
        self._process.wait()
        last = self._lines[-1].removeprefix("tessera: ") if self._lines else "it printed nothing"
        raise ConfigError(f"the server for the chat does not start: {last}")

    def _keep_reading(self) -> None:
        """A pipe that nothing reads would stop the server at its next line."""
        assert self._process.stderr is not None
        self._lines.extend(line.rstrip() for line in self._process.stderr)

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader.is_alive():
            self._reader.join(STOP_SECONDS)
        if self._process.stderr is not None:
            self._process.stderr.close()


def _end_with_parent() -> None:
    """The kernel sends SIGTERM when the chat ends, however it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(SIGNAL_AT_PARENTS_END, signal.SIGTERM)
