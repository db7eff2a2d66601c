"""The page with a real server and a key: what it is asked for, how the server answers, figures that move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers.browser import Page, browser_page, find_browser
from tests.support.servers.server_fixture import Server, running_server

KEY = "a-key-for-the-page"
WATCH_THE_ANSWER_GROW = """
window.lengths = new Set();
new MutationObserver(() => {
  const text = [...document.querySelectorAll('.assistant .text')].at(-1);
  if (text) lengths.add(text.textContent.length);
}).observe(document.querySelector('#messages'), {subtree: true, childList: true, characterData: true});
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    find_browser()  # no server where there is nobody to look at it
    options = ("--api-key", KEY, "--num-kv-blocks", "256", "--log-format", "json")
    with running_server(None, tmp_path_factory.mktemp("page") / "log", *options) as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def page(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("profile")) as page:
        page.open(server.url)
        yield page


def enter_key(page: Page, key: str) -> None:
    page.until("document.querySelector('#key-dialog').open")
    page.write("#key", key)
    page.press_enter()


def test_the_page_asks_for_the_key_until_it_is_right(page: Page, server: Server) -> None:
    enter_key(page, "wrong")
    page.until("document.querySelector('#key-note').textContent.includes('did not take')")
    enter_key(page, KEY)
    page.until("document.querySelector('#state').textContent === 'ready'")
    assert page.text("#model") == server.model
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")
    assert page.evaluate("document.cookie") == ""


def test_the_chat_streams(page: Page) -> None:
    page.evaluate(WATCH_THE_ANSWER_GROW)
    page.write("#prompt", "Reverse this list: apple, kite, zebra, melon, rose, pear")
    page.press_enter()
    page.until("document.querySelector('.cost')")
    answer = page.text(".assistant .text")
    assert answer.startswith("pear, rose, melon")
    lengths = page.evaluate("[...lengths]")
    assert any(0 < length < len(answer) for length in lengths), f"the answer came whole: {lengths}"
    assert "tokens/s" in page.text(".cost")


def test_occupancy_moves_under_load_and_back(page: Page, server: Server) -> None:
    page.click("#tab-dashboard")
    page.until("document.querySelector('#models td')")
    assert page.evaluate("document.querySelector('#models').innerText").split()[-4:-2] == [server.model, "1"]
    page.until("document.querySelectorAll('#blocks i').length === 256")
    body = server.body("Once upon a time", 1500)
    with server.stream(body):
        page.until("document.querySelectorAll('#blocks i.used').length > 2")
        assert page.text("#running") == "1"
        assert "in use" in page.evaluate("document.querySelector('#blocks').getAttribute('aria-label')")
        page.until("Number(document.querySelector('#generation-rate').textContent) > 0")
    page.until("document.querySelectorAll('#blocks i.used').length === 0")
    assert page.text("#running") == "0"
    assert page.evaluate("document.querySelectorAll('#blocks i.cached').length") > 2, "kept for equal prefixes"


def test_nothing_went_wrong_behind_the_page(page: Page, server: Server) -> None:
    assert [fault for fault in page.faults if "401" not in fault] == []
    assert KEY not in server.log
    assert '"endpoint": "/v1/chat/completions", "status": 200' in server.log
