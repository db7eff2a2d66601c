"""Requests that fail or whose client leaves are no garbage for a collection to find, which would hold up all others."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tessera.app.server.application import create_app
from tests.support.fakes.fake_client import FakeClient
from tests.support.servers.http_fixtures import as_engines
from tests.support.servers.surface_fixtures import tool_settings

NUM_REQUESTS = 60


@contextmanager
def garbage() -> Iterator[list[Any]]:
    """Objects that the collector finds inside the `with`. Earlier garbage is freed first, or it would be found too."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


async def ask(app: Any, path: str, body: bytes, *, key: str | None = "sk-a", leaves: bool = False) -> int:
    """The status of one request, 0 where its client left before the answer began."""
    headers = [(b"host", b"tiny"), (b"content-type", b"application/json")]
    headers += [(b"authorization", b"Bearer " + key.encode())] if key is not None else []
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"},
        **{"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers},
        **{"client": ("127.0.0.1", 1), "server": ("tiny", 80), "state": {}},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    statuses = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.01 if leaves else 3600)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    return statuses[0] if statuses else 0


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hello", **fields}).encode()


FORMS: dict[str, tuple[str, bytes, dict[str, Any], set[int]]] = {
    "no key": ("/v1/completions", completion(), {"key": None}, {401}),
    "an unknown key": ("/v1/completions", completion(), {"key": "sk-b"}, {401}),
    "a wrong field": ("/v1/completions", completion(max_tokens=-1), {}, {400}),
    "no JSON": ("/v1/completions", b"{", {}, {400}),
    "a model that is not served": ("/v1/completions", completion(model="other"), {}, {404}),
    "a path that is none": ("/v1/nothing", b"{}", {}, {404}),
    "a client that leaves": ("/v1/completions", completion(), {"leaves": True}, {0, 499}),
    "a client that leaves a stream": ("/v1/completions", completion(stream=True), {"leaves": True}, {0, 200}),
    "a client that leaves four": ("/v1/completions", completion(n=4, stream=True), {"leaves": True}, {0, 200}),
}


@pytest.mark.parametrize("form", FORMS)
def test_fault_stalls_failed_requests_leave_no_cycles(form: str, tmp_path: Path) -> None:
    path, body, options, statuses = FORMS[form]
    client = FakeClient(lambda submission: [])
    client.hang = True

    async def left() -> Counter[str]:
        app = create_app(as_engines(client), tool_settings(tmp_path, api_keys=("sk-a",)))
        for _ in range(2):  # what is made once, at the first request
            assert await ask(app, path, body, **options) in statuses
        with garbage() as found:
            for _ in range(NUM_REQUESTS):
                await ask(app, path, body, **options)
            await asyncio.sleep(0)
            gc.collect()
            return Counter(type(one).__name__ for one in found)

    found = asyncio.run(left())
    assert sum(found.values()) < NUM_REQUESTS, found.most_common(10)
