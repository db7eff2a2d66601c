"""Authentication: comparisons that end early, and filters by prefix that forget routes."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import pytest

from tessera.app.http.auth import OPEN_PATHS
from tessera.app.ops.page_files import FOLDER
from tessera.app.server.application import PAGE_ROUTES, ROUTES
from tessera.app.settings import AppSettings
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, call_each, ids, settings_for, write_model_folder

HELLO = play(ids("hello"), finish="length")


def keyed(folder: Path, **changes: Any) -> AppSettings:
    return settings_for(write_model_folder(folder), api_keys=("right", "other"), **changes)


def test_fault_authentication_every_route_and_method_wants_a_key_but_the_written_list(tmp_path: Path) -> None:
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
    assert {"/", "/health", "/ping", "/ready", "/version", "/metrics"} == OPEN_PATHS
    files = (path.relative_to(FOLDER.parent) for path in FOLDER.rglob("*") if path.suffix in (".js", ".css", ".svg"))
    open_paths = {*OPEN_PATHS, *(f"/{file.as_posix()}" for file in files)}
    assert paths >= OPEN_PATHS
    assert "/ui/{name:path}" in paths
    paths |= set(sorted(open_paths - OPEN_PATHS)[::8])
    methods = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")
    requests = [(method, path) for path in sorted(paths) for method in methods]
    responses = call_each(
        client, settings, [(method, path.replace("{name:path}", "tiny")) for method, path in requests]
    )
    for (method, path), response in zip(requests, responses, strict=True):
        meant = path if path == "/" else path.removesuffix("/")  # a slash at the end changes nothing
        assert (response.status_code == 401) == (meant not in open_paths), (method, path, response.status_code)


@pytest.mark.parametrize(
    "authorization",
    [None, "right", "Bearer", "Bearer ", "Bearer wrong", "Bearer righ", "Bearer rightt", "Basic right", "Bearer RIGHT"],
)
def test_fault_authentication_wrong_keys(tmp_path: Path, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    response = call(FakeClient(always(HELLO)), keyed(tmp_path), "GET", "/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_fault_authentication_right_keys(tmp_path: Path) -> None:
    settings = keyed(tmp_path)
    for key in ("right", "other"):
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {key}"}
            assert call(FakeClient(always(HELLO)), settings, "GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["right", "other", "wrong", "r", "x" * 5000])
def test_fault_authentication_digests_of_all_keys_are_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """Whichever key fits, and whether one does, as many comparisons are made of texts of the same length."""
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest

    def compare_digest(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return original(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    call(FakeClient(always(HELLO)), keyed(tmp_path), "GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
    assert len(compared) == 2
    assert {len(side) for pair in compared for side in pair} == {32}


def test_fault_authentication_answers_before_the_body_is_read(tmp_path: Path) -> None:
    """Nor does a wrong key learn whether a path, a model or a body is right."""
    client = FakeClient(always(HELLO))
    answers = set()
    for path, content in [("/v1/completions", b"{"), ("/v1/completions", b"x" * 2**20), ("/v1/nowhere", b"")]:
        response = call(client, keyed(tmp_path), "POST", path, content=content)
        answers.add((response.status_code, response.content))
    assert len(answers) == 1
