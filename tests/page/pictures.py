"""Pictures of the page for the documentation: `python -m tests.page.pictures` writes docs/images/page-*.png."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.page.opening import open_page
from tests.page.upstream import Reply, running_upstream
from tests.support.paths import ROOT
from tests.support.servers.browser import Page, browser_page

ANSWER = Path(__file__).with_name("answer.md").read_text()
FOLDER = ROOT / "docs" / "images"
QUESTIONS = ("Plan a week of dinners for four", "Translate the release notes into French", "Why is my query slow?")
QUESTION = "How does a hash table work? Show me some Python."
SIZES = {"": (1280, 900), "-phone": (390, 800)}


def ask(page: Page, text: str) -> None:
    page.write("#prompt", text)
    page.press_enter()
    page.until("!document.querySelector('.busy') && document.querySelector('.cost')")
    page.until("document.querySelector('#send').checkVisibility()")


def settle(page: Page) -> None:
    """Wait until fonts, transitions and two frames are done."""
    page.evaluate(
        "Promise.all(document.getAnimations().filter((each) => each.effect.getTiming().iterations < 9)"
        ".map((each) => each.finished)).then(() => new Promise((resolve) =>"
        " requestAnimationFrame(() => requestAnimationFrame(() => resolve(1)))))"
    )


def main() -> None:
    with running_upstream() as upstream, browser_page(Path(tempfile.mkdtemp())) as page:
        page.resize(*SIZES[""])
        open_page(page, upstream.url)
        pieces = [ANSWER[begin : begin + 5] for begin in range(0, len(ANSWER), 5)]
        upstream.replies[QUESTION] = Reply([{"reasoning": "A short overview with code."}, *pieces], per_second=400)
        for question in QUESTIONS:
            ask(page, question)
            page.click("#new")
        ask(page, QUESTION)
        for theme in ("light", "dark"):
            for suffix, (width, height) in SIZES.items():
                page.resize(width, height, dark=theme == "dark", phone=suffix != "")
                page.evaluate("document.querySelector('#tab-chat').click()")
                page.evaluate("document.activeElement.blur(); document.querySelector('#scroller').scrollTop = 0")
                settle(page)
                page.screenshot(FOLDER / f"page-chat{suffix}-{theme}.png")
                page.evaluate("document.querySelector('#tab-dashboard').click(); document.activeElement.blur()")
                page.resize(width, height + 520 * (suffix == ""), dark=theme == "dark", phone=suffix != "")
                page.until("document.querySelectorAll('#keys td').length")
                settle(page)
                page.screenshot(FOLDER / f"page-dashboard{suffix}-{theme}.png")


if __name__ == "__main__":
    main()
