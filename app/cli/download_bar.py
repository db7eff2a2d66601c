"""Progress of a download from the hub: one bar on a terminal, one line elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

BYTES = "B"  # the unit of bars that count bytes; others count files


class _Display:
    """The bar of all files together."""

    def __init__(self, name: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(name, total=None)
        self._begun = False

    def show(self, bars: Iterable[HubBar]) -> None:
        """The hub's client counts bytes twice, as received and as written: the one that is ahead is shown."""
        counting = [bar for bar in bars if bar.unit == BYTES]
        done, total = (max((getattr(bar, name) for bar in counting), default=0) for name in ("n", "total"))
        if total:
            if not self._begun:
                self._progress.start()
                self._begun = True
            self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._begun:
            self._progress.stop()


class HubBar:
    """As much of tqdm's interface as the hub's client uses; draws nothing itself."""

    display: _Display | None = None
    bars: list[HubBar]
    _lock = threading.RLock()

    def __init__(self, iterable: Iterable[Any] | None = None, **settings: Any) -> None:
        self._iterable = iterable
        self.unit = settings.get("unit", "it")
        self.total = settings.get("total") or 0
        self.n = settings.get("initial") or 0
        self.bars.append(self)

    def update(self, n: float | None = 1) -> None:
        with self._lock:
            self.n += n or 0
            if self.display is not None:
                self.display.show(self.bars)

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable or ():
            yield item
            self.update()

    def __enter__(self) -> HubBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, _name: str) -> Any:
        """Descriptions, postfixes, refreshing, closing: nothing is done."""
        return _nothing

    @classmethod
    def silent(cls) -> type[HubBar]:
        """A class of bars that are not shown."""
        return type("SilentBar", (cls,), {"bars": []})

    @classmethod
    def get_lock(cls) -> Any:
        return cls._lock

    @classmethod
    def set_lock(cls, lock: Any) -> None:
        cls._lock = lock


def _nothing(*_: object, **_settings: object) -> None:
    return None


@contextlib.contextmanager
def download_bar(name: str) -> Iterator[type[HubBar]]:
    """A class of bars for `tqdm_class` of the hub's client, shown as one until the block ends."""
    display = _Display(name) if sys.stderr.isatty() else None
    if display is None:
        print(f"downloading {name}", file=sys.stderr, flush=True)

    bar = HubBar.silent()
    bar.display = display
    try:
        yield bar
    finally:
        if display is not None:
            display.close()
