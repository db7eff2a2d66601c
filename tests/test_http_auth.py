"""API keys: every route wants one, wrong ones are refused alike, and keys do not see each other's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.application import PAGE_ROUTES, ROUTES
from app.auth import OPEN_PATHS
from app.settings import AppSettings
from tests.fake_client import FakeClient, always, play
from tests.http_fixtures import call, ids, settings_for, write_model_folder

TEXT = {"model": "tiny", "prompt": "hi"}
HELLO = play(ids("hello"), finish="length")


def keyed(folder: Path, **changes: Any) -> AppSettings:
    return settings_for(write_model_folder(folder), api_keys=("right", "other"), **changes)


def test_every_route_wants_a_key_but_the_written_list(tmp_path: Path) -> None:
    settings = keyed(tmp_path)
    client = FakeClient(always(HELLO))
    paths = {route.path for routes in ROUTES + PAGE_ROUTES for route in routes.router.routes}
    assert len(paths) >= 10
    paths |= {
        "/nowhere",
        "/ui",
        "/ui/",
        "/ui/index.html",
        "/index.html",
        "/health/",
        "/healthx",
        "/metrics/x",
        "http://tiny//health",
        "/V1/models",
        "/openapi.json",
        "/docs",
    }
    assert paths >= OPEN_PATHS
    for path in sorted(paths):
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            status = call(client, settings, method, path.replace("{name:path}", "tiny")).status_code
            assert (status == 401) == (path not in OPEN_PATHS), (method, path, status)


@pytest.mark.parametrize(
    "authorization",
    [None, "right", "Bearer", "Bearer ", "Bearer wrong", "Bearer righ", "Bearer rightt", "Basic right", "Bearer RIGHT"],
)
def test_wrong_keys(tmp_path: Path, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    response = call(FakeClient(always(HELLO)), keyed(tmp_path), "GET", "/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_right_keys(tmp_path: Path) -> None:
    settings = keyed(tmp_path)
    for key in ("right", "other"):
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {key}"}
            assert call(FakeClient(always(HELLO)), settings, "GET", "/v1/models", headers=headers).status_code == 200


def salts(settings: AppSettings, key: str | None, salt: str | None) -> str:
    client = FakeClient(always(HELLO))
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {**TEXT, "cache_salt": salt}
    assert call(client, settings, "POST", "/v1/completions", json=body, headers=headers).status_code == 200
    return client.submissions[0].cache_salt


def test_keys_do_not_share_the_prefix_cache_unless_asked(tmp_path: Path) -> None:
    private, shared = keyed(tmp_path), keyed(tmp_path, share_prefix_cache=True)
    assert salts(private, "right", None) == salts(private, "right", None) != ""
    four = {salts(private, key, salt) for key in ("right", "other") for salt in (None, "s")}
    assert len(four) == 4
    assert not any("right" in salt or "other" in salt for salt in four)
    assert salts(shared, "right", None) == salts(shared, "other", None)
    assert salts(shared, "right", "s") == salts(shared, "other", "s") != salts(shared, "other", None)
    open_settings = settings_for(tmp_path)
    assert salts(open_settings, None, None) == ""
    assert salts(open_settings, None, "s") != ""
