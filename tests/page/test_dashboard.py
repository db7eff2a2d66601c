"""The dashboard in a real browser, for a server of several models."""

from __future__ import annotations

import json

from tests.page.opening import open_page
from tests.page.upstream import MODELS, Upstream
from tests.support.browser import Page

LOADED, UNLOADED = MODELS[0], "on-demand"
HOUR_OF_UNLOADED = f"history.json?model={UNLOADED}"
UNKNOWN = "\N{EN DASH}"


def test_one_of_several_models_is_chosen(page: Page, upstream: Upstream) -> None:
    upstream.default_names = [LOADED, UNLOADED]
    try:
        open_page(page, upstream.url)
        page.click("#tab-dashboard")
        page.until("document.querySelector('#running').textContent === '48'")
        upstream.asked.clear()
        choose(page, UNLOADED)
        page.until(f"document.querySelector('#running').textContent === '{UNKNOWN}'")
        page.until(f"document.querySelector('#model').textContent === {json.dumps(UNLOADED)}")
        assert page.text("#total-requests") == page.text("#generation-rate") == UNKNOWN, "no figures of the other"
        page.until(
            f"performance.getEntriesByType('resource').some(({{ name }}) => name.endsWith({HOUR_OF_UNLOADED!r}))"
        )
        assert ("/status/history.json", UNLOADED) in upstream.asked
        choose(page, LOADED)
        page.until("document.querySelector('#running').textContent === '48'")
    finally:
        upstream.default_names = MODELS[:1]
        open_page(page, upstream.url)


def test_a_single_model_is_no_choice(page: Page, upstream: Upstream) -> None:
    page.click("#tab-dashboard")
    page.until("document.querySelector('#running').textContent === '48'")
    assert page.evaluate("document.querySelector('#shown-model').checkVisibility()") is False


def choose(page: Page, name: str) -> None:
    page.evaluate(
        "{ const choice = document.querySelector('#shown-model');"
        f" choice.value = {json.dumps(name)}; choice.dispatchEvent(new Event('change')); }}"
    )
