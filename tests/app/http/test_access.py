"""Who may call: keys from options, file and environment, Anthropic's header, and pages of other origins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.app.cli.api_keys import gather_api_keys
from tessera.app.cli.serve_options import SERVE_OPTIONS
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import ConfigError
from tessera.options.errors import OptionError
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, ids, settings_for, write_model_folder

CORS_ORIGIN = next(declared for declared in SERVE_OPTIONS.options if declared.name == "cors-origin")
HELLO = play(ids("hello"), finish="length")


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESSERA_API_KEY", raising=False)


def test_keys_of_options_and_file_count_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team's\nsk-one\n\n  sk-two  \nsk-one\n")
    assert gather_api_keys((), str(file)) == ("sk-one", "sk-two")
    assert gather_api_keys(["sk-zero", "sk-two"], str(file)) == ("sk-zero", "sk-two", "sk-one")
    assert gather_api_keys(["a"], None) == ("a",)
    assert gather_api_keys((), None) == ()


@pytest.mark.parametrize("content", [b"", b"# nothing\n\n", b"two words\n", "schlüssel\n".encode(), b"\xff\n"], ids=str)
def test_a_file_that_would_leave_the_server_open_or_cannot_match_ends_the_start(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file") as failure:
        gather_api_keys((), str(file))
    assert "two words" not in str(failure.value), "keys are not shown"


def test_a_missing_file_and_an_empty_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        gather_api_keys((), str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="--api-key"):
        gather_api_keys([""], None)


def keyed(folder: Path) -> AppSettings:
    return settings_for(write_model_folder(folder), api_keys=("right", "other"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "right"}, 200),
        ({"x-api-key": "other"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "Bearer right"}, 401),
        ({"x-api-key": "wrong", "authorization": "Bearer right"}, 200),
        ({"x-api-key": "right", "authorization": "Bearer wrong"}, 200),
        ({"x-api-key": "wrong", "authorization": "Bearer wrong"}, 401),
    ],
    ids=str,
)
def test_anthropics_header(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    response = call(FakeClient(always(HELLO)), keyed(tmp_path), "GET", "/v1/models", headers=headers)
    assert response.status_code == status


PREFLIGHT = {"origin": "https://chat.example", "access-control-request-method": "POST"}
PREFLIGHT["access-control-request-headers"] = "authorization,content-type"


def test_cors_is_off_unless_asked_for(tmp_path: Path) -> None:
    response = call(FakeClient(always(HELLO)), keyed(tmp_path), "OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert response.status_code == 401
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_cors_for_the_origins_that_were_given(tmp_path: Path) -> None:
    settings = settings_for(
        write_model_folder(tmp_path),
        api_keys=("right",),
        cors_origins=("https://chat.example", "http://localhost:3000"),
    )
    client = FakeClient(always(HELLO))
    asked = call(client, settings, "OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert asked.status_code == 200, "browsers ask without a key"
    assert asked.headers["access-control-allow-origin"] == "https://chat.example"
    stranger = call(client, settings, "OPTIONS", "/v1/completions", headers={**PREFLIGHT, "origin": "https://evil"})
    assert "access-control-allow-origin" not in stranger.headers
    for headers, status in (({"authorization": "Bearer right"}, 200), ({}, 401)):
        answer = call(client, settings, "GET", "/v1/models", headers={**headers, "origin": "https://chat.example"})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://chat.example", "errors too can be read"
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("text", ["*", "https://example.org", "http://localhost:3000"])
def test_origins(text: str) -> None:
    assert CORS_ORIGIN.parse_item(text) == text


@pytest.mark.parametrize(
    "text", ["example.org", "https://example.org/", "https://a b", "ftp://x", "https://*.example.org"]
)
def test_what_is_no_origin(text: str) -> None:
    with pytest.raises(OptionError, match="origin"):
        CORS_ORIGIN.parse_item(text)
