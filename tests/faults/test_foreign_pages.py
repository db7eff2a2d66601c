"""Pages of other sites in a user's browser: requests that need no preflight, and DNS rebinding."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tessera.app.settings import AppSettings
from tests.support.servers.http_fixtures import call, settings_for, write_model_folder
from tests.support.servers.server_fixture import Server, running_server
from tests.support.servers.surface_fixtures import says

TEXT = b'{"model": "tiny", "prompt": "hi"}'
JSON = {"content-type": "application/json"}
PAGE = "https://evil.example"


@pytest.fixture
def local(tmp_path: Path) -> AppSettings:
    return settings_for(write_model_folder(tmp_path), allowed_hosts=("tiny", "Other.Example"))


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {"content-type": ""}], ids=str)
def test_fault_foreign_pages_a_body_is_declared_as_json(local: AppSettings, headers: dict[str, str]) -> None:
    client = says("ok")
    response = call(client, local, "POST", "/v1/completions", content=TEXT, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert not client.submissions


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "origin": PAGE},
        {"origin": PAGE},
        {"origin": "null"},
        {"origin": "https://["},
    ],
    ids=str,
)
def test_fault_foreign_pages_of_other_origins_are_refused(local: AppSettings, headers: dict[str, str]) -> None:
    client = says("ok")
    response = call(client, local, "POST", "/v1/completions", content=TEXT, headers={**JSON, **headers})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert call(client, local, "DELETE", "/v1/responses/x", headers=headers).status_code == 403
    assert call(client, local, "GET", "/v1/models", headers=headers).status_code == 200, "which it cannot read"
    assert not client.submissions


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "same-origin", "origin": "http://tiny"},
        {"sec-fetch-site": "none"},
        {"origin": "http://tiny"},
        {"sec-fetch-site": "cross-site", "origin": "https://chat.example"},
    ],
    ids=str,
)
def test_fault_foreign_pages_the_right_ones_are_answered(tmp_path: Path, headers: dict[str, str]) -> None:
    settings = settings_for(write_model_folder(tmp_path), cors_origins=("https://chat.example",))
    response = call(says("ok"), settings, "POST", "/v1/completions", content=TEXT, headers={**JSON, **headers})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("a.localhost", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.0.7", 200),
        ("tiny:80", 200),
        ("other.example", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("[", 403),
    ],
)
def test_fault_foreign_pages_only_the_servers_own_names_are_answered(
    local: AppSettings, host: str, status: int
) -> None:
    for path in ("/v1/models", "/health", "/"):
        response = call(says("ok"), local, "GET", path, headers={"host": host})
        assert response.status_code == status
    assert status == 200 or response.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [((), 403), (("--api-key", "k"), 401), (("--allowed-host", "evil.example"), 200)],
    ids=str,
)
def test_fault_foreign_pages_an_open_server_on_the_loopback_knows_its_names(
    tmp_path: Path, arguments: tuple[str, ...], status: int
) -> None:
    def ask(server: Server) -> httpx.Response:
        return server.http.get("/v1/models", headers={"host": "evil.example"})

    with running_server(None, tmp_path / "log", *arguments) as server:
        assert ask(server).status_code == status
        assert server.http.get("/health").status_code == 200
