"""The dashboard in a real browser, for a server of several models."""

from __future__ import annotations

import json

from tests.page.opening import open_page
from tests.page.upstream import MODELS, Upstream
from tests.support.servers.browser import Page

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


def test_drafts_are_shown_as_tokens_per_step_of_a_request(page: Page, upstream: Upstream) -> None:
    page.click("#tab-dashboard")
    page.until("document.querySelector('#running').textContent === '48'")
    assert page.text("#step-tokens") == "1.82"


def test_fine_tuning_jobs_are_shown_with_their_losses(page: Page, upstream: Upstream) -> None:
    page.click("#tab-dashboard")
    page.until("document.querySelectorAll('#fine-tuning tbody tr').length === 2")
    rows = "[...document.querySelectorAll('#fine-tuning tbody tr')]"
    running, queued = page.evaluate(f"{rows}.map((row) => [...row.children].map((cell) => cell.textContent))")
    assert running[:6] == ["ftjob-1", MODELS[1], "running", "120 of 400", "0.7383", "0.8100"]
    assert queued[:6] == ["ftjob-2", MODELS[1], "queued", UNKNOWN, UNKNOWN, UNKNOWN]
    path = page.evaluate("document.querySelector('#fine-tuning .stroke').getAttribute('d')")
    assert path.count("L") == 119
    label = page.evaluate("document.querySelector('#fine-tuning svg').getAttribute('aria-label')")
    assert label == "Loss from 2.8587 to 0.7383"


def choose(page: Page, name: str) -> None:
    page.evaluate(
        "{ const choice = document.querySelector('#shown-model');"
        f" choice.value = {json.dumps(name)}; choice.dispatchEvent(new Event('change')); }}"
    )
