"""Opening the page in a tab."""

from __future__ import annotations

from tests.support.servers.browser import Page


def open_page(page: Page, url: str) -> None:
    """Returns once the page knows what is served."""
    page.open(url)
    page.until("document.querySelector('#model-choice')?.value")
