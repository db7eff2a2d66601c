"""Pictures of a load test's report and of the documentation: `python -m tests.page.site_pictures`, after `make docs`.

It writes docs/images/load-report-*.png, from a sweep of a simulated server, and docs/images/site-*.png.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tessera.app.cli.command import main as tessera
from tests.page.terminal_pictures import FOLDER
from tests.support.fakes.load_stub import Manner, StubServer
from tests.support.paths import ROOT
from tests.support.servers.browser import Page, browser_page

SITE = ROOT / "build" / "site"
SIZES = {"": (1240, 930), "-phone": (390, 800)}
SLOTS = 24  # sequences that the simulated server works on at a time
TOKENS = 48  # of a completion


def report(file: Path) -> None:
    """A sweep of a server whose tokens take longer the more requests run, and whose first tokens wait for a slot."""
    with StubServer() as server:

        def manner(_index: int, _body: object) -> Manner:
            now = server.running + 1
            tpot = 0.006 + 0.0005 * min(now, SLOTS)
            return Manner(ttft=0.03 + 0.004 * min(now, SLOTS) + max(0.0, now / SLOTS - 1) * TOKENS * tpot, tpot=tpot)

        server.manner, server.cached_tokens = manner, 0
        options = f"--sweep-concurrency --output-len {TOKENS} --goodput ttft:250 tpot:25 --model example-model"
        code = tessera(["bench", "--base-url", server.url, *options.split(), "--no-progress", "--html", str(file)])
        assert code == 0
        file.write_text(file.read_text().replace(server.url, "http://gpu1:8000"))


def show(page: Page, file: Path, name: str) -> None:
    for theme in ("light", "dark"):
        for suffix, (width, height) in SIZES.items():
            page.resize(width, height, dark=theme == "dark", phone=suffix != "")
            page.open(file.as_uri())
            page.evaluate("localStorage.clear()")  # the theme that the site has chosen at the first look
            page.open(file.as_uri())
            page.screenshot(FOLDER / f"{name}{suffix}-{theme}.png")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser_page(Path(tempfile.mkdtemp())) as page:
        file = Path(folder, "report.html")
        report(file)
        show(page, file, "load-report")
        show(page, SITE / "operating" / "index.html", "site")


if __name__ == "__main__":
    main()
