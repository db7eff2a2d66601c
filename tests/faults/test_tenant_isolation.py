"""Tenant isolation: cache keys that others could guess or choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tessera.app.settings import AppSettings
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, ids, serve, settings_for, write_model_folder
from tests.support.servers.surface_fixtures import says

TEXT = {"model": "tiny", "prompt": "hi"}
HELLO = play(ids("hello"), finish="length")


def keyed(folder: Path, **changes: Any) -> AppSettings:
    return settings_for(write_model_folder(folder), api_keys=("right", "other"), **changes)


def salts(settings: AppSettings, key: str | None, salt: str | None) -> str:
    client = FakeClient(always(HELLO))
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {**TEXT, "cache_salt": salt}
    assert call(client, settings, "POST", "/v1/completions", json=body, headers=headers).status_code == 200
    return client.submissions[0].cache_salt


def test_fault_tenant_isolation_keys_do_not_share_the_prefix_cache_unless_asked(tmp_path: Path) -> None:
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


def test_fault_tenant_isolation_both_headers_are_the_same_tenant(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO))
    for headers in ({"x-api-key": "right"}, {"authorization": "Bearer right"}, {"x-api-key": "other"}):
        body = {"model": "tiny", "prompt": "hi"}
        assert call(client, keyed(tmp_path), "POST", "/v1/completions", json=body, headers=headers).status_code == 200
    by_header, by_bearer, stranger = (submission.cache_salt for submission in client.submissions)
    assert by_header == by_bearer != stranger


def test_fault_tenant_isolation_no_key_deletes_what_another_stored(tmp_path: Path) -> None:
    """Under the id of its owner's response, which it may have learned."""
    with serve(says("mine"), keyed(tmp_path)) as url:
        owner, stranger = ({"authorization": f"Bearer {key}"} for key in ("right", "other"))
        ask = {"model": "tiny", "input": "hi"}
        path = f"{url}/v1/responses/{httpx.post(f'{url}/v1/responses', json=ask, headers=owner).json()['id']}"
        for method in ("GET", "DELETE"):
            assert httpx.request(method, path, headers=stranger).status_code == 404
        assert httpx.get(path, headers=owner).status_code == 200
        assert httpx.delete(path, headers=owner).json()["deleted"] is True
        assert httpx.get(path, headers=owner).status_code == 404
