"""The page without a browser: its files, access to its figures, and the figures themselves."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera.app.keys.api_key import ApiKey, digest_of
from tessera.app.model_settings import ModelSettings
from tessera.app.ops.hour_history import INTERVAL, HourHistory
from tessera.app.ops.page_files import FILES, FOLDER, PAGE
from tessera.app.ops.root_routes import RUNNING
from tessera.app.server.application import create_app
from tessera.engine.contract.histogram import SECONDS_PER_REQUEST, SECONDS_PER_TOKEN, SECONDS_TO_FIRST_TOKEN
from tessera.engine.contract.messages import EngineTotals, GpuUsage, SchedulerStats
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import (
    as_engines,
    call,
    ids,
    settings_for,
    sharing_templates,
    write_model_folder,
)

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
        num_draft_tokens=tokens // 2,
        num_accepted_draft_tokens=tokens // 4,
    )
    return SchedulerStats(running, 1, 60 - used, 4, used, totals)


def status(client: FakeClient, folder: Path, **changes: Any) -> Any:
    answer = call(client, settings_for(write_model_folder(folder), **changes), "GET", "/status.json")
    assert answer.status_code == 200
    return answer.json()


def test_the_page_and_all_that_it_names_are_served(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path))
    assert set(FILES.values()) == {path for path in FOLDER.rglob("*") if path.is_file()}
    for path in (PAGE, "/ui/main.js", "/ui/style/theme.css", "/ui/icon.svg"):
        answer = call(FakeClient(always(HELLO)), settings, "GET", path, headers=BROWSER)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        tag = {"if-none-match": answer.headers["etag"]}
        again = call(FakeClient(always(HELLO)), settings, "GET", path, headers={**BROWSER, **tag})
        assert (again.status_code, again.content) == (304, b"")


def test_the_page_names_its_files_relative_to_itself_and_nothing_elsewhere(tmp_path: Path) -> None:
    page = call(
        FakeClient(always(HELLO)), settings_for(write_model_folder(tmp_path)), "GET", PAGE, headers=BROWSER
    ).text
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
    assert {f"/{name}" for name in named} == {path for path in FILES if path != PAGE}, "all modules are fetched at once"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", page)
    for path in FOLDER.rglob("*.*"):
        text = path.read_text()
        outside = re.findall(
            r"(?:https?:)?//[\w-]+\.\w+", re.sub(r"https?://(www\.w3\.org|spec\.commonmark\.org)", "", text)
        )
        assert not outside, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        for name in re.findall(r'(?:from|import) "(\.[^"]+)"', text):
            assert (path.parent / name).is_file(), f"{path} imports {name}"


def test_text_and_marks_stand_out_in_both_themes() -> None:
    """WCAG's contrast: 4.5 for text, 3 for edges of controls and marks."""
    theme = (FOLDER / "style/theme.css").read_text()
    found = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}), #\w{6}\);", theme))
    dark = dict(re.findall(r"--([\w-]+): light-dark\(#\w{6}, (#\w{6})\);", theme))
    assert found.keys() == dark.keys()

    def contrast(one: str, other: str) -> float:
        lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
        return (lighter + 0.05) / (darker + 0.05)

    texts = {"ink", "quiet", "accent", *(name for name in found if name.startswith("hl-"))}
    pairs = {(text, ground, 4.5) for text in texts for ground in ("page", "side", "card", "raised")}
    pairs |= {("control", ground, 3.0) for ground in ("page", "side", "card", "raised")}
    pairs |= {("accent-soft", "card", 3.0), ("accent-ink", "accent", 4.5), ("ink", "mark", 4.5), ("page", "ink", 4.5)}
    pairs |= {("good", "good-soft", 4.5), ("bad", "bad-soft", 4.5), ("bad", "card", 4.5), ("page", "bad", 4.5)}
    for colors in (found, dark):
        assert [pair for pair in sorted(pairs) if contrast(colors[pair[0]], colors[pair[1]]) < pair[2]] == []


def luminance(color: str) -> float:
    """WCAG's relative luminance of #rrggbb."""
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("folder", sorted({path.parent for path in FOLDER.rglob("*.js")}), ids=lambda path: path.name)
def test_the_pages_modules_are_small_and_imports_point_down(folder: Path) -> None:
    floors = ["ui", "chat", "dashboard", "shell", "markdown", "code", "maths", "dom"]
    modules = list(folder.glob("*.js"))
    assert len(modules) <= 15
    for path in modules:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        assert text.startswith("// "), f"{path} does not say what it is"
        for name in re.findall(r'(?:from|import) "(\.[^"]+)"', text):
            other = (path.parent / name).resolve().parent
            assert floors.index(other.name) >= floors.index(folder.name), f"{path} imports {name}"


def test_figures_need_the_key_and_the_page_does_not(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), api_keys=("right",))
    client = FakeClient(always(HELLO))
    assert call(client, settings, "GET", "/").status_code == 200
    assert call(client, settings, "GET", "/status.json").status_code == 401
    assert call(client, settings, "GET", "/status.json", headers={"authorization": "Bearer right"}).status_code == 200


def test_without_ui_there_is_no_page(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), ui=False)
    for path in (PAGE, "/ui/main.js", "/status.json", "/status/history.json"):
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
    assert (found["totals"]["draft_tokens"], found["totals"]["accepted_draft_tokens"]) == (750, 375)
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


def test_the_hour_is_kept_in_points_of_its_intervals(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO))
    hour = HourHistory(as_engines(client)[0].client)
    hour.sample()
    assert hour.as_object()["points"] == []
    for number in range(300):
        client.history.append((INTERVAL * number, stats(150 * number, running=2, used=15, observed=number)))
        hour.sample()
        hour.sample()
    points = hour.as_object()["points"]
    assert len(points) == 240
    assert (points[0]["age"], points[-1]["age"]) == (239 * INTERVAL, 0)
    assert points[-1]["generation_tokens"] == 10
    assert points[-1]["prompt_tokens"] == 20
    assert points[-1]["requests"] == 1
    assert points[-1]["kv_usage"] == pytest.approx(15 / 64, abs=1e-4)
    assert points[-1]["ttft"] == pytest.approx((0.0025 + 0.005) / 2)
    client.history.append((INTERVAL * 300, stats(0)))
    hour.sample()
    assert hour.as_object()["points"][-1]["age"] == INTERVAL, "a new engine counts from nothing"


def test_each_model_has_an_hour_of_its_own(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    second = ModelSettings(model_folder=str(folder), served_model_names=("second",))
    clients = [FakeClient(always(HELLO)), FakeClient(always(HELLO))]
    app = create_app(as_engines(*clients), settings_for(folder, other_models=(second,)))
    for number in range(3):
        clients[1].history.append((INTERVAL * number, stats(150 * number)))
        for history in app.state.hour_histories:
            history.sample()

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            hours = [await http.get("/status/history.json", params={"model": name}) for name in ("tiny", "second")]
            status = await http.get("/status.json", params={"model": "second"})
            return [*(hour.json()["points"] for hour in hours), status.json()]

    first, points, status = asyncio.run(ask())
    assert (first, len(points)) == ([], 2)
    assert (status["models"], status["default_names"]) == (["second", "tiny"], ["tiny", "second"])


def test_use_is_told_by_model_and_to_each_key_its_own(tmp_path: Path) -> None:
    named = tuple(
        ApiKey(name=name, sha256=(digest_of(name),), slot=slot, may_administer=name == "chief")
        for slot, name in enumerate(("chief", "one", "two"))
    )
    settings = settings_for(
        write_model_folder(tmp_path), embedding_model_names=("vectors",), api_keys=("plain",), keys=named
    )

    async def ask() -> list[Any]:
        with sharing_templates():
            app = create_app(as_engines(FakeClient(always(HELLO))), settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as http:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 8}
            for key in ("one", "one", "two"):
                await http.post("/v1/completions", json=body, headers={"x-api-key": key})
            return [
                (await http.get("/status.json", headers={"x-api-key": key})).json()["use"]
                for key in ("plain", "chief", "one")
            ]

    plain, chief, one = asyncio.run(ask())
    tokens = {"prompt_tokens": 3 * len(ids("abc")), "generation_tokens": 3 * len(ids("hello"))}
    assert plain["models"] == [
        {"name": "tiny", "requests": 3, **tokens},
        {"name": "vectors", "requests": 0, "prompt_tokens": 0, "generation_tokens": 0},
    ]
    assert plain == chief
    assert [(key["name"], key["requests"]) for key in plain["keys"]] == [("chief", 0), ("one", 2), ("two", 1)]
    assert [(key["name"], key["requests"], key["generation_tokens"]) for key in one["keys"]] == [
        ("one", 2, 2 * len(ids("hello")))
    ]
