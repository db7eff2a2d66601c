"""What stands before all routes, alone: keys, foreign pages, and the limits of keys and memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tessera.app.http.access_log import trace_of
from tessera.app.http.auth import OPEN_PATHS, AuthMiddleware, OriginMiddleware
from tessera.app.http.limits import LimitsMiddleware, account_of, account_of_host, holder_of, lease_of
from tessera.app.keys.api_key import AcceptedKeys, ApiKey, digest_of
from tessera.app.keys.key_ring import KeyRing, account_of_owner, background_account
from tessera.app.limits.key_use import Cell, KeyUse
from tessera.app.limits.memory_watermark import MemoryWatermark
from tessera.engine.contract.messages import NO_ACCOUNT

OK = 204
HEADERS = list[tuple[bytes, bytes]]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers whatever reaches it, and keeps it."""
    scope.setdefault("reached", []).append(scope.get("path"))
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": OK, "headers": [(b"own", b"1")]})
        await send({"type": "http.response.body", "body": b""})


def http(method: str = "POST", path: str = "/v1/completions", headers: HEADERS | None = None, **more: Any) -> Any:
    given = headers if headers is not None else [(b"host", b"localhost")]
    return {"type": "http", "method": method, "path": path, "headers": given, **more}


def pass_by(gate: Any, scope: Any) -> None:
    """What is no request, or is never answered."""
    asyncio.run(gate(scope, None, None))


def ask(gate: Any, scope: Any) -> tuple[int, str | None, dict[bytes, bytes]]:
    """-> status, the error's code, headers."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("a gate reads no body")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(gate(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    code = json.loads(body)["error"]["code"] if body else None
    assert (sent[0]["status"] == OK) == ("reached" in scope)
    assert not any("headers" in message for message in sent[1:])
    return sent[0]["status"], code, dict(sent[0]["headers"])


# ---- keys ---------------------------------------------------------------------------------------


RING = KeyRing(AcceptedKeys(("sk-plain",), (ApiKey(name="alice", sha256=(digest_of("sk-alice"),), slot=1),)))


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ([], None),
        ([(b"authorization", b"Bearer sk-plain")], "key-1"),
        ([(b"authorization", b"bEARER  sk-alice ")], "alice"),
        ([(b"authorization", b"Basic sk-plain")], None),
        ([(b"authorization", b"sk-plain")], None),
        ([(b"authorization", b"Bearer")], None),
        ([(b"x-api-key", b"sk-alice")], "alice"),
        ([(b"x-api-key", b"wrong")], None),
        ([(b"x-api-key", b"wrong"), (b"authorization", b"Bearer sk-plain")], "key-1"),
        ([(b"authorization", b"Bearer sk-plain"), (b"authorization", b"Bearer sk-alice")], "key-1"),
        ([(b"x-api-key", b"wrong"), (b"x-api-key", b"sk-alice")], None),
    ],
)
def test_the_first_key_of_each_header_opens(headers: HEADERS, name: str | None) -> None:
    scope = http(headers=headers)
    status, code, found = ask(AuthMiddleware(app, RING), scope)
    if name is None:
        assert (status, code, found[b"www-authenticate"]) == (401, "invalid_api_key", b"Bearer")
        assert str(trace_of(scope).error).startswith("The API key is not valid" if headers else "No API key was given")
        assert holder_of(scope) is None
    else:
        holder = holder_of(scope)
        assert holder is not None
        assert (status, holder.name, scope["state"]["tenant"]) == (OK, name, holder.tenant)
        assert trace_of(scope).context["key"] == name


def test_what_needs_no_key() -> None:
    gate = AuthMiddleware(app, RING, ["/page.js"])
    for path in (*OPEN_PATHS, "/page.js"):
        assert ask(gate, http("GET", path))[0] == OK
    for path in ("/health/", "/page.js2", "/v1/models"):
        assert ask(gate, http("GET", path))[0] == 401
    lifespan = {"type": "lifespan", "path": "/v1/models"}
    pass_by(gate, lifespan)
    assert lifespan["reached"]


# ---- foreign pages ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *(("localhost", True), ("LOCALHOST:80", True), ("a.localhost", True), ("alocalhost", False)),
        *(("tessera.example:1", True), ("Tessera.Example", True), ("x.tessera.example", False)),
        *(("127.0.0.1:8000", True), ("[::1]:80", True), ("10.1.2.3", True), ("1.2.3", False)),
        *(("", False), ("[", False), ("evil.example", False)),
    ],
)
def test_names_of_the_server(host: str, is_own: bool) -> None:
    gate = OriginMiddleware(app, ["Tessera.example"], [])
    scope = http("GET", headers=[(b"host", host.encode())])
    assert ask(gate, scope)[:2] == ((OK, None) if is_own else (403, "host_not_allowed"))
    assert (trace_of(scope).error is None) == is_own
    assert ask(OriginMiddleware(app, ["*"], []), http("GET", headers=[(b"host", host.encode())]))[0] == OK


@pytest.mark.parametrize(
    ("method", "origins", "headers", "is_let_in"),
    [
        ("POST", [], {}, True),
        ("POST", [], {"sec-fetch-site": "same-origin"}, True),
        ("POST", [], {"sec-fetch-site": "none"}, True),
        ("POST", [], {"sec-fetch-site": "cross-site"}, False),
        ("DELETE", [], {"sec-fetch-site": "same-site", "origin": "http://localhost"}, False),
        ("POST", [], {"origin": "http://LOCALHOST"}, True),
        ("POST", [], {"origin": "http://localhost:81"}, False),
        ("POST", [], {"origin": "null"}, False),
        ("POST", [], {"origin": "http://["}, False),
        ("POST", ["http://a.example"], {"sec-fetch-site": "cross-site", "origin": "http://a.example"}, True),
        ("POST", ["http://a.example"], {"sec-fetch-site": "cross-site", "origin": "http://b.example"}, False),
        ("POST", ["*"], {"sec-fetch-site": "cross-site", "origin": "http://b.example"}, True),
        *((method, [], {"sec-fetch-site": "cross-site"}, True) for method in ("GET", "HEAD", "OPTIONS")),
    ],
)
def test_pages_that_may_call(method: str, origins: list[str], headers: dict[str, str], is_let_in: bool) -> None:
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = http(method, headers=[(b"host", b"localhost"), *fields])
    answer = ask(OriginMiddleware(app, [], origins), scope)[:2]
    assert answer == ((OK, None) if is_let_in else (403, "origin_not_allowed"))


def test_what_is_no_request_passes_by() -> None:
    lifespan = {"type": "lifespan"}
    pass_by(OriginMiddleware(app, [], []), lifespan)
    pass_by(LimitsMiddleware(app, KeyUse(), MemoryWatermark(0)), lifespan)
    assert len(lifespan["reached"]) == 2


# ---- limits -------------------------------------------------------------------------------------


def held_by(**fields: Any) -> dict[str, Any]:
    ring = KeyRing(AcceptedKeys((), (ApiKey(name="alice", sha256=("0" * 64,), slot=3, **fields),)))
    return {"holder": ring._holders[0][1]}


def test_a_request_holds_its_keys_place_while_it_runs() -> None:
    use, seen = KeyUse(), []

    async def look(scope: Any, receive: Any, send: Any) -> None:
        seen.append(use.total(3, Cell.REQUESTS_UNDER_WAY))
        assert lease_of(scope) is not None
        await app(scope, receive, send)

    gate = LimitsMiddleware(look, use, MemoryWatermark(0))
    status, _, headers = ask(gate, http(state=held_by(max_requests=1, requests_per_minute=5)))
    assert (status, seen, use.total(3, Cell.REQUESTS_UNDER_WAY)) == (OK, [1], 0)
    assert (headers[b"own"], headers[b"x-ratelimit-remaining-requests"]) == (b"1", b"4")

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pass_by(LimitsMiddleware(fail, use, MemoryWatermark(0)), http(state=held_by(max_requests=1)))
    assert use.total(3, Cell.REQUESTS_UNDER_WAY) == 0
    use.count(3, Cell.REQUESTS_UNDER_WAY)
    scope = http(state=held_by(max_requests=1, requests_per_minute=5))
    status, code, headers = ask(gate, scope)
    assert (status, code, headers[b"x-ratelimit-limit-requests"]) == (429, "rate_limit_exceeded", b"5")
    assert b"retry-after" in headers
    assert trace_of(scope).error is not None
    assert use.total(3, Cell.REQUESTS_UNDER_WAY) == 1
    for free in (http("GET", state=held_by(max_requests=1)), http(path="/health", state=held_by(max_requests=1))):
        assert ask(LimitsMiddleware(app, use, MemoryWatermark(0)), free)[0] == OK, "no work"
        assert lease_of(free) is None


def test_requests_without_an_entry_have_no_limits_but_memory() -> None:
    scope = http()
    assert ask(LimitsMiddleware(app, KeyUse(), MemoryWatermark(0)), scope) == (OK, None, {b"own": b"1"})
    assert (lease_of(scope), lease_of({}), holder_of({})) == (None, None, None)
    plain = {"holder": RING.find(b"sk-plain")}
    assert ask(LimitsMiddleware(app, KeyUse(), MemoryWatermark(0)), http(state=plain))[2] == {b"own": b"1"}
    low = LimitsMiddleware(app, KeyUse(), MemoryWatermark(10, lambda: 9))
    assert ask(low, http(state=plain))[:2] == (503, "out_of_memory")
    assert ask(low, http("GET"))[0] == OK


@pytest.mark.parametrize(
    "path", ["/reset_prefix_cache", "/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
)
def test_only_keys_that_may_administer_act_on_the_whole_server(path: str) -> None:
    gate = LimitsMiddleware(app, KeyUse(), MemoryWatermark(0))
    assert ask(gate, http(path=path, state=held_by()))[:2] == (403, "insufficient_permissions")
    may: list[Callable[[], dict[str, Any]]] = [
        lambda: held_by(may_administer=True),
        lambda: {"holder": RING.find(b"sk-plain")},
        dict,
    ]
    for state in may:
        assert ask(gate, http(path=path, state=state()))[0] == OK


def test_whose_account_a_request_has() -> None:
    state = held_by()
    assert account_of({"state": state, "client": ("1.2.3.4", 5)}) == state["holder"].account
    assert account_of({"client": ("1.2.3.4", 5)}) == account_of_owner("1.2.3.4") == account_of_host("1.2.3.4")
    background = {"in_background": True, "tenant": "t"}
    assert account_of({"state": background, "client": ("1.2.3.4", 5)}) == background_account("t")
    assert account_of({"state": {"in_background": True}}) == background_account("")
    assert account_of({"client": None}) == account_of({}) == NO_ACCOUNT
    assert account_of_host("testclient") == NO_ACCOUNT
    assert account_of_host("::ffff:1.2.3.4") == account_of_owner("1.2.3.4")
    assert account_of_host("2001:db8:1:2::1") == account_of_host("2001:db8:1:2:ffff::9%eth0")
    assert account_of_host("2001:db8:1:2::1") == account_of_owner("2001:db8:1:2::/64")
    assert account_of_host("2001:db8:1:3::1") != account_of_host("2001:db8:1:2::1")
