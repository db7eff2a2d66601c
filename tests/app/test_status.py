"""The status page without a browser: what it is made of, who may see what, and the figures that it is fed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tessera.app.http.auth import PAGE_PATHS
from tessera.app.ops.root_routes import RUNNING
from tessera.app.ops.status_routes import FILES, FOLDER
from tessera.engine.contract.histogram import SECONDS_PER_REQUEST, SECONDS_PER_TOKEN, SECONDS_TO_FIRST_TOKEN
from tessera.engine.contract.messages import EngineTotals, GpuUsage, SchedulerStats
from tests.support.fake_client import FakeClient, always, play
from tests.support.http_fixtures import call, ids, settings_for, write_model_folder

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
HELLO = play(ids("hello"), finish="length")


def counts(bounds: tuple[float, ...], bucket: int, number: int) -> list[int]:
    found = [0] * (len(bounds) + 1)
    found[bucket] = number
    return found


def stats(tokens: int, *, running: int = 0, used: int = 0, observed: int = 0) -> SchedulerStats:
    """`tokens` generated so far; each latency seen `observed` times in its third bucket."""
    totals = EngineTotals(
        num_prompt_tokens=2 * tokens,
        num_generation_tokens=tokens,
        num_prefix_queries=100,
        num_prefix_hits=25,
        num_preemptions=1,
        num_finished={"stop": tokens // 10, "length": 0, "abort": 0, "error": 0},
        time_to_first_token=counts(SECONDS_TO_FIRST_TOKEN, 2, observed),
        inter_token_latency=counts(SECONDS_PER_TOKEN, 2, observed),
        e2e_latency=counts(SECONDS_PER_REQUEST, 2, observed),
    )
    return SchedulerStats(running, 1, 60 - used, 4, used, totals)


def status(client: FakeClient, folder: Path, **changes: Any) -> Any:
    answer = call(client, settings_for(write_model_folder(folder), **changes), "GET", "/status.json")
    assert answer.status_code == 200
    return answer.json()


def test_the_page_and_all_that_it_names_are_served(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path))
    assert set(FILES) == set(PAGE_PATHS)
    assert {path.name for path in FOLDER.iterdir()} == {name for name, _ in FILES.values()}
    for path, (name, media_type) in FILES.items():
        answer = call(FakeClient(always(HELLO)), settings, "GET", path, headers=BROWSER)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(media_type)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.content == (FOLDER / name).read_bytes()


def test_the_page_needs_nothing_from_elsewhere_and_nothing_inline() -> None:
    sources = {path.name: path.read_text() for path in FOLDER.iterdir()}
    for name, text in sources.items():
        assert not re.findall(r"(?:https?:)?//[\w-]+\.\w+", text.replace("http://www.w3.org/2000/svg", "")), name
    page = sources["index.html"]
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {f"/{name}" for name in named} <= set(FILES), "relative, so that they work below a prefix"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
    assert "innerHTML" not in "".join(sources.values()), "what a model writes is text"
    written = set(re.findall(r'(?:show|at)\("([\w-]+)"', sources["status.js"]))
    assert written <= set(re.findall(r'id="([\w-]+)"', page))


def test_figures_need_the_key_and_the_page_does_not(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), api_keys=("right",))
    client = FakeClient(always(HELLO))
    assert call(client, settings, "GET", "/").status_code == 200
    assert call(client, settings, "GET", "/status.json").status_code == 401
    assert call(client, settings, "GET", "/status.json", headers={"authorization": "Bearer right"}).status_code == 200


def test_without_ui_there_is_no_page(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), ui=False)
    for path in (*FILES, "/status.json"):
        answer = call(FakeClient(always(HELLO)), settings, "GET", path, headers=BROWSER)
        assert answer.status_code == 404 or (path, answer.text) == ("/", RUNNING)


@pytest.mark.parametrize("accept", [None, "*/*", "application/json"])
def test_a_program_is_told_that_the_server_runs(tmp_path: Path, accept: str | None) -> None:
    headers = {"accept": accept} if accept is not None else {}
    answer = call(FakeClient(always(HELLO)), settings_for(write_model_folder(tmp_path)), "GET", "/", headers=headers)
    assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert answer.headers["vary"] == "accept", "a cache keeps both"


def test_what_is_served_is_told_before_anything_has_happened(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO), info=None)
    client.well = False
    found = status(client, tmp_path)
    assert found["models"] == ["tiny"]
    assert found["state"] == {"ready": False, "reason": "the engine is starting"}
    assert [found[name] for name in ("engine", "now", "rates", "latency", "totals", "gpu")] == [None] * 6
    assert found["history"] == []


def test_rates_are_of_the_last_seconds_and_latencies_of_the_last_minute(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO))
    client.gpu = GpuUsage(1, 4, None)
    client.history.extend(
        [
            (10.0, stats(0)),
            (95.0, stats(1000, observed=50)),
            (135.0, stats(1000, observed=50)),
            (140.0, stats(1500, running=3, used=20, observed=60)),
        ]
    )
    found = status(client, tmp_path)
    assert found["rates"] == {"prompt_tokens": 200.0, "generation_tokens": 100.0, "requests": 10.0}
    assert found["latency"]["ttft"]["p50"] == pytest.approx((0.0025 + 0.005) / 2)
    assert found["latency"]["itl"]["p99"] == pytest.approx(0.001 + 0.99 * 0.0015)
    assert found["now"] == {"running": 3, "waiting": 1, "blocks_used": 20, "blocks_cached": 4, "blocks_free": 40}
    assert found["totals"]["finished"]["stop"] == 150
    assert found["gpu"] == {"memory_used": 1, "memory_total": 4, "utilization": None}
    assert [(point["age"], point["generation_tokens"]) for point in found["history"]] == [(45, 11.8), (5, 0), (0, 100)]


def test_a_long_history_is_thinned_out_up_to_the_present(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO))
    client.history.extend((index / 2, stats(50 * index)) for index in range(241))
    points = status(client, tmp_path)["history"]
    assert 50 <= len(points) <= 61
    assert points[-1]["age"] == 0
    assert {point["generation_tokens"] for point in points} == {100.0}


def test_latencies_of_which_there_were_none_are_unknown(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO))
    client.history.extend([(1.0, stats(0)), (2.0, stats(0))])
    assert status(client, tmp_path)["latency"]["e2e"] == {"p50": None, "p99": None}
