"""The bar of a download, driven as the hub's client drives tqdm."""

from __future__ import annotations

import io
import sys

import pytest
from rich.progress import Progress

from tessera.app.cli.download_bar import HubBar, download_bar


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bytes_of_all_files_are_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalText()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(Progress, "stop", Progress.refresh)  # the last state stays
    with download_bar("org/model") as bar_class:
        received, written = (bar_class(desc="Downloading", total=0, unit="B", unit_scale=True) for _ in range(2))
        for bar in (received, written):
            bar.total += 4_000_000
            bar.refresh()
        files = list(bar_class(iter("abc"), total=3, desc="Fetching"))
        received.update(3_000_000)
        written.update(1_000_000)
        written.set_description("Reconstruction complete")
        received.close()
    assert files == ["a", "b", "c"]
    shown = terminal.getvalue()
    assert "org/model" in shown
    assert "3.0/4.0 MB" in shown


def test_without_a_terminal_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with download_bar("org/model") as bar_class, bar_class(total=5, unit="B") as bar:
        bar.update(5)
    assert capsys.readouterr().err == "downloading org/model\n"


def test_downloads_do_not_share_their_bars() -> None:
    one, other = HubBar.silent(), HubBar.silent()
    one(unit="B")
    assert (len(one.bars), len(other.bars)) == (1, 0)
    lock = one.get_lock()
    with lock:
        other.set_lock(lock)
