"""Progress bars on a terminal, and lines above them."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


class ProgressBars:
    """A bar for each stage, on standard error."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None

    def draw(self, stage: str, done: int, total: int, amount: str) -> None:
        """`amount` stands beside the bar."""
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console)
            self._progress.start()
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=total, amount="")
        self._progress.update(self._bars[stage], completed=done, total=total, amount=amount)

    def print_line(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        """Leave the bars as they are."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
