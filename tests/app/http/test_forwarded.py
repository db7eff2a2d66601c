"""X-Forwarded-*: believed from the proxies that the operator names alone; prefixes of paths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tessera.app.http.forwarded import ForwardedMiddleware, TrustedProxies
from tessera.app.http.limits import account_of
from tessera.app.settings import parse_mode, parse_proxy
from tessera.engine.contract.errors import ConfigError
from tessera.options.errors import OptionError
from tests.support.servers.http_fixtures import call, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import says

CHAIN = TrustedProxies(("127.0.0.0/8", "10.0.0.0/8", "fd00::/8"))


@pytest.mark.parametrize(
    ("chain", "client"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("1.1.1.1, 203.0.113.7", "203.0.113.7"),  # what the client has sent itself is not believed
        ("203.0.113.7, 10.1.2.3, 10.0.0.1", "203.0.113.7"),
        ("203.0.113.7:4711, 10.0.0.1", "203.0.113.7"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("10.0.0.9, 10.0.0.1", "10.0.0.9"),
        ("203.0.113.7, nonsense, 10.0.0.1", "10.0.0.1"),
        ("unknown", None),
        ("", None),
    ],
)
def test_the_client_is_the_last_address_that_no_trusted_proxy_has(chain: str, client: str | None) -> None:
    assert CHAIN.client_of([hop.strip() for hop in chain.split(",") if hop.strip()]) == client


def passed(peer: tuple[str, int] | None, path: str = "/v1/models", root: str = "", **fields: str) -> dict[str, Any]:
    """The scope that a request's route sees."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    headers = [(b"host", b"inside:8000"), *((n.replace("_", "-").encode(), v.encode()) for n, v in fields.items())]
    scope = {"type": "http", "client": peer, "scheme": "http", "path": path, "headers": headers}
    middleware = ForwardedMiddleware(app, TrustedProxies(("10.0.0.0/8", "unix")), root)

    async def run() -> None:
        await middleware(scope, None, None)  # type: ignore[arg-type]

    asyncio.run(run())
    found: dict[str, Any] = seen[0]
    return found


ALL = {
    "x_forwarded_for": "203.0.113.7",
    "x_forwarded_proto": "https",
    "x_forwarded_host": "llm.example.org",
    "x_forwarded_prefix": "/llm",
}


@pytest.mark.parametrize("peer", [("10.0.0.1", 5), None], ids=["address", "unix"])
def test_a_trusted_proxy_is_believed(peer: tuple[str, int] | None) -> None:
    scope = passed(peer, **ALL)
    assert (scope["client"], scope["scheme"]) == (("203.0.113.7", 0), "https")
    assert [value for name, value in scope["headers"] if name == b"host"] == [b"llm.example.org"]
    assert scope["state"]["root_path"] == "/llm"
    assert account_of(scope) == account_of({"client": ("203.0.113.7", 1)}) != account_of({"client": ("10.0.0.1", 1)})


@pytest.mark.parametrize("peer", [("203.0.113.9", 5), ("127.0.0.1", 5)])
def test_others_are_not_believed(peer: tuple[str, int]) -> None:
    scope = passed(peer, **ALL)
    assert (scope["client"], scope["scheme"]) == (peer, "http")
    assert [value for name, value in scope["headers"] if name == b"host"] == [b"inside:8000"]
    assert "state" not in scope


def test_nonsense_of_a_trusted_proxy_is_left_out() -> None:
    wrong = {"x_forwarded_proto": "javascript", "x_forwarded_host": "a b", "x_forwarded_prefix": '/"><script>'}
    scope = passed(("10.0.0.1", 5), **wrong)
    assert scope["scheme"] == "http"
    assert (b"host", b"inside:8000") in scope["headers"]
    assert "state" not in scope


@pytest.mark.parametrize(
    ("path", "route"),
    [("/llm/v1/models", "/v1/models"), ("/v1/models", "/v1/models"), ("/llm", "/"), ("/llm/", "/"), ("/llms", "/llms")],
)
def test_a_prefix_is_taken_off_where_the_proxy_has_left_it(path: str, route: str) -> None:
    scope = passed(("203.0.113.9", 5), path, "/llm")
    assert (scope["path"], scope["state"]["root_path"]) == (route, "/llm")


def test_page_and_description_work_below_a_prefix(tmp_path: Path) -> None:
    settings = settings_for(write_model_folder(tmp_path), root_path="/a/llm")
    client = says("ok")
    for path in ("/a/llm", "/a/llm/", "/"):
        page = call(client, settings, "GET", path, headers={"accept": "text/html"})
        assert '<base href="/a/llm/">' in page.text
        assert '="/' not in page.text.replace('<base href="/', ""), "all links of the page are relative"
        assert "base-uri 'self'" in page.headers["content-security-policy"]
    assert call(client, settings, "GET", "/a/llm/ui/shell/key.js").status_code == 200
    assert call(client, settings, "GET", "/a/llm/openapi.json").json()["servers"] == [{"url": "/a/llm"}]
    assert call(client, settings, "GET", "/a/llm/models").json()["data"][0]["id"] == "tiny"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    assert call(client, settings, "POST", "/a/llm/v1/chat/completions", json=chat).status_code == 200


@pytest.mark.parametrize("root_path", ["/v1", "/api/llm", "/chat", "/health"])
def test_a_prefix_that_begins_a_route_is_refused(tmp_path: Path, root_path: str) -> None:
    with pytest.raises(ConfigError, match="begins a path of the API"):
        call(says("ok"), settings_for(write_model_folder(tmp_path), root_path=root_path), "GET", "/health")


def test_proxies_and_modes_are_checked() -> None:
    assert [parse_proxy(text) for text in ("unix", "10.0.0.1", "10.0.0.0/8")] == ["unix", "10.0.0.1/32", "10.0.0.0/8"]
    assert (parse_mode("660"), parse_mode("0")) == (0o660, 0)
    for wrong, complaint in (("*", "must be an address, a network"), ("10.0.0.1/8", "bits are set beyond")):
        with pytest.raises(OptionError, match=complaint):
            parse_proxy(wrong)
    with pytest.raises(OptionError, match="permissions in octal"):
        parse_mode("888")
