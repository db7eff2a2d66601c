"""One browser and one server for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.page.opening import open_page
from tests.page.upstream import Upstream, running_upstream
from tests.support.servers.browser import Page, browser_page, find_browser


@pytest.fixture(scope="package")
def upstream() -> Iterator[Upstream]:
    find_browser()  # no server where nothing looks at it
    with running_upstream() as upstream:
        yield upstream


@pytest.fixture(scope="package")
def browser(upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("profile")) as page:
        page.resize(1280, 800)
        open_page(page, upstream.url)
        yield page


@pytest.fixture
def page(browser: Page, upstream: Upstream) -> Iterator[Page]:
    """The page without conversations, drafts and settings."""
    upstream.replies.clear()
    upstream.bodies.clear()
    if browser.evaluate("location.href") != f"{upstream.url}/":
        open_page(browser, upstream.url)
    browser.evaluate(RESET)
    browser.until("document.querySelector('#toast-text').textContent === 'All conversations deleted.'")
    browser.faults.clear()
    yield browser
    assert browser.faults == []


RESET = """
  localStorage.clear();
  document.querySelector("#toast-text").textContent = "";
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  document.querySelector("#search").value = document.querySelector("#prompt").value = "";
  document.querySelector("#tab-chat").click();
  document.querySelector("#remove-all").click();
  document.querySelector("#sure [value=yes]").click();
"""
