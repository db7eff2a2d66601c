"""Live progress of a run in the terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from tessera.loadtest.client.client_process import Progress


class LiveProgress:
    """A bar on standard error with requests under way, failures and tokens per second; a context manager."""

    def __init__(self, title: str, num_requests: int, *, disable: bool = False) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[running]} under way, {task.fields[rate]:.0f} tok/s{task.fields[failed]}"),
            console=Console(stderr=True),
            disable=disable or not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=num_requests, running=0, rate=0.0, failed="")
        self._last = (time.monotonic(), 0)

    def __enter__(self) -> LiveProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        """Tokens per second are those of the last half second or more."""
        now = time.monotonic()
        then, tokens = self._last
        fields: dict[str, Any] = {"running": progress.running}
        if now - then > 0.5:
            self._last = (now, progress.output_tokens)
            fields["rate"] = (progress.output_tokens - tokens) / (now - then)
        if progress.failed:
            fields["failed"] = f", [red]{progress.failed} failed[/]"
        self._bar.update(self._task, completed=progress.done, **fields)
