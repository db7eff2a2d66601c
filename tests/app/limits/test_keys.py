"""The keys file: names, digests, limits over all app processes, rights, and how refusals look."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tessera.app.cli.command import main
from tessera.app.cli.keys_command import add_key, revoke_key
from tessera.app.keys.api_key import AcceptedKeys, ApiKey, KeyEntry, digest_of, new_key
from tessera.app.keys.key_ring import KeyRing
from tessera.app.keys.keys_file import MAX_KEYS, read_keys_file, with_slots
from tessera.app.limits.key_use import Cell, KeyUse, Rate, duration
from tessera.app.limits.lease import Lease, RateLimitError
from tessera.app.limits.shared_memory import make_shared_memory
from tessera.app.settings import AppSettings
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.machine import available_memory, num_cores
from tests.support.fakes.fake_client import FakeClient, always, play
from tests.support.servers.http_fixtures import call, ids, serve, settings_for, write_model_folder

HELLO = play(ids("hello"), finish="length")
ASK: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 5}
KEY = "sk-alice"
DIGEST = "a" * 64


def entry(name: str = "alice", key: str = KEY, **fields: Any) -> ApiKey:
    return ApiKey(name=name, sha256=(digest_of(key),), slot=0, **fields)


def keyed(folder: Path, **fields: Any) -> AppSettings:
    return settings_for(write_model_folder(folder), keys=(entry(**fields),))


def bearing(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- the file -----------------------------------------------------------------------------------


def test_a_key_is_made_shown_replaced_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    arguments = ("--api-keys-file", str(file))
    assert main(["keys", "add", "alice", *arguments, "--weight", "2", "--max-requests", "3", "--may-administer"]) == 0
    first = capsys.readouterr().out.strip()
    (alice,) = read_keys_file(file)
    assert alice == KeyEntry(name="alice", sha256=(digest_of(first),), weight=2.0, max_requests=3, may_administer=True)
    assert first not in file.read_text()
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert main(["keys", "add", "alice", *arguments]) == 0
    second = capsys.readouterr().out.strip()
    assert read_keys_file(file)[0].sha256 == (digest_of(first), digest_of(second))
    assert read_keys_file(file)[0].weight == 2.0
    assert main(["keys", "list", *arguments]) == 0
    assert capsys.readouterr().out == (
        f"alice  {digest_of(first)[:12]},{digest_of(second)[:12]}  weight=2 max_requests=3 may_administer\n"
    )
    assert main(["keys", "revoke", "alice", "--digest", digest_of(first)[:8], *arguments]) == 0
    assert read_keys_file(file)[0].sha256 == (digest_of(second),)
    assert main(["keys", "revoke", "alice", *arguments]) == 0
    assert read_keys_file(file) == ()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "say what to do: add, list, revoke"),
        (("remove",), "not remove"),
        (("add",), "NAME"),
        (("add", "two words"), "two words"),
        (("revoke", "bob"), "no key of bob"),
        (("list", "--api-keys-file", "/none"), "cannot be read"),
    ],
)
def test_wrong_uses_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    file = tmp_path / "keys.yaml"
    add_key(file, "alice", {})
    given = arguments if "--api-keys-file" in arguments else (*arguments, "--api-keys-file", str(file))
    assert main(["keys", *given]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("keys: [", "neither YAML nor JSON"),
        ("- a", "object"),
        ("keys: [{name: a}]", "sha256"),
        ("keys: [{name: a, sha256: abc}]", "sha256"),
        (f"keys: [{{name: 'a b', sha256: {DIGEST}}}]", "name"),
        (f"keys: [{{name: a, sha256: {DIGEST}, max_request: 1}}]", "max_request"),
        (f"keys: [{{name: a, sha256: {DIGEST}, max_requests: 0}}]", "max_requests"),
        (f"keys: [{{name: a, sha256: {DIGEST}, weight: 1000}}]", "weight"),
        (f"keys: [{{name: a, sha256: {DIGEST}}}, {{name: a, sha256: {'b' * 64}}}]", "the name a occurs twice"),
        (f"keys: [{{name: a, sha256: {DIGEST}}}, {{name: b, sha256: {DIGEST}}}]", "a key of b occurs twice"),
        (f"keys: [{{name: a, sha256: {DIGEST}, slot: 3}}]", "slot"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_used_says_where(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_keys_file(file)


def test_json_and_one_digest_without_a_list_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"name": "a", "sha256": DIGEST, "tokens_per_minute": 5}]}))
    assert read_keys_file(file) == (KeyEntry(name="a", sha256=(DIGEST,), tokens_per_minute=5),)
    file.write_text("")
    assert read_keys_file(file) == ()


def test_names_keep_their_slots() -> None:
    entries = [KeyEntry(name=f"k{number}", sha256=(f"{number:064x}",)) for number in range(MAX_KEYS + 2)]
    before = with_slots(entries[:3])
    assert [key.slot for key in before] == [0, 1, 2]
    after = with_slots([entries[2], entries[3]], before)
    assert [(key.name, key.slot) for key in after] == [("k2", 2), ("k3", 3)]
    full = with_slots(entries[2:], after)
    assert sorted(key.slot for key in full) == list(range(MAX_KEYS))
    assert full[0].slot == 2


def test_keys_are_random_and_found_by_digest() -> None:
    key = new_key()
    assert len(key) > 50
    assert key != new_key()
    ring = KeyRing(AcceptedKeys(("plain",), (entry(key=key, weight=3.0, max_waiting=7, may_use_priority=True),)))
    found = ring.find(key.encode())
    assert found is not None
    assert (found.name, found.account.weight, found.account.max_waiting, found.account.outranks) == (
        "alice",
        3.0,
        7,
        True,
    )
    plain = ring.find(b"plain")
    assert plain is not None
    assert (plain.name, plain.key, plain.account.weight, plain.account.outranks) == ("key-1", None, 1.0, False)
    assert plain.account.id != found.account.id
    assert ring.find(b"other") is None


# ---- counts -------------------------------------------------------------------------------------


class Clock:
    now = 6000.0

    def __call__(self) -> float:
        return self.now


def test_the_last_minute_slides() -> None:
    clock = Clock()
    use = KeyUse(clock=clock)
    clock.now += 30
    use.count_rate(5, Rate.TOKENS, 100)
    assert use.in_last_minute(5, Rate.TOKENS) == 100
    clock.now += 45  # a quarter of the next window
    assert use.in_last_minute(5, Rate.TOKENS) == 75
    use.count_rate(5, Rate.TOKENS, 20)
    assert use.in_last_minute(5, Rate.TOKENS) == 95
    for most in (90.0, 50.0, 20.0, 10.0, 0.0):
        seconds = use.seconds_until(5, Rate.TOKENS, most)
        before = clock.now
        clock.now += seconds + 1e-6
        assert use.in_last_minute(5, Rate.TOKENS) <= most + 1e-3
        clock.now = before + 0.99 * seconds
        assert use.in_last_minute(5, Rate.TOKENS) > most
        clock.now = before
    assert use.in_last_minute(6, Rate.TOKENS) == 0
    clock.now += 120
    assert use.in_last_minute(5, Rate.TOKENS) == 0


def test_processes_count_together_and_one_that_starts_again_has_nothing_under_way() -> None:
    fd, clock = make_shared_memory("keys"), Clock()
    first, second = (KeyUse(fd, 2, part, clock) for part in range(2))
    for use in (first, second):
        use.count(3, Cell.REQUESTS_UNDER_WAY, 2)
        use.count_rate(3, Rate.REQUESTS, 2)
    key = ApiKey(name="a", sha256=("0" * 64,), slot=3, max_requests=4)
    with pytest.raises(RateLimitError, match="4 requests at a time"):
        Lease(key, first).begin()
    assert second.in_last_minute(3, Rate.REQUESTS) == 4
    KeyUse(fd, 2, 1, clock)
    assert first.total(3, Cell.REQUESTS_UNDER_WAY) == 2
    assert first.in_last_minute(3, Rate.REQUESTS) == 4
    assert first.total(2, Cell.REQUESTS_UNDER_WAY) == 0


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (0.2, "1s"), (59.1, "1m0s"), (90, "1m30s")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---- over HTTP ----------------------------------------------------------------------------------


def test_fault_keys_limits_by_minute_are_refused_with_the_headers_that_openais_clients_read(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO))
    with serve(client, keyed(tmp_path, requests_per_minute=2, tokens_per_minute=1000)) as url:
        answers = [httpx.post(f"{url}/v1/completions", json=ASK, headers=bearing()) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
        assert answers[0].headers["x-ratelimit-limit-tokens"] == "1000"
        remaining = [int(answer.headers["x-ratelimit-remaining-tokens"]) for answer in answers]
        num_tokens = len(ids("hi")) + len(ids("hello"))
        assert remaining[2] == 1000 - 2 * num_tokens
        assert answers[0].headers["x-ratelimit-reset-requests"].endswith("s")
        error = answers[2].json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "2 requests a minute" in error["message"]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 120
        assert httpx.get(f"{url}/v1/models", headers=bearing()).status_code == 200, "only work is limited"
        metrics = httpx.get(f"{url}/metrics").text
        assert 'tessera:key_requests_total{key="alice"} 2.0' in metrics
        assert 'tessera:key_requests_refused_total{key="alice"} 1.0' in metrics
        assert f'tessera:key_generation_tokens_total{{key="alice"}} {2.0 * len(ids("hello"))}' in metrics
        assert 'tessera:key_requests_under_way{key="alice"} 0.0' in metrics
        assert 'tessera:key_sequences_under_way{key="alice"} 0.0' in metrics


@pytest.mark.parametrize(
    ("fields", "body", "message"),
    [
        ({"max_sequences": 3}, {**ASK, "n": 4}, "3 sequences at a time"),
        ({"tokens_per_minute": 3}, {**ASK, "prompt": [5] * 4}, "3 tokens a minute, and this request has 4"),
    ],
)
def test_limits_of_one_request(tmp_path: Path, fields: dict[str, int], body: dict[str, Any], message: str) -> None:
    answer = call(
        FakeClient(always(HELLO)), keyed(tmp_path, **fields), "POST", "/v1/completions", json=body, headers=bearing()
    )
    assert answer.status_code == 429
    assert message in answer.json()["error"]["message"]
    assert "retry-after" in answer.headers


def test_places_of_requests_and_sequences_come_back_when_clients_leave(tmp_path: Path) -> None:
    client = FakeClient(always([]), hang=True)
    with serve(client, keyed(tmp_path, max_requests=1, max_sequences=2)) as url:
        for _ in range(3):
            client.submitted.clear()
            with httpx.Client(base_url=url, headers=bearing(), timeout=0.5) as http:
                with pytest.raises(httpx.TimeoutException):
                    http.post("/v1/completions", json={**ASK, "n": 2})
                assert client.submitted.is_set()
            metrics = ""
            for _ in range(100):
                metrics = httpx.get(f"{url}/metrics").text
                if 'key_sequences_under_way{key="alice"} 0.0' in metrics:
                    break
            assert 'tessera:key_sequences_under_way{key="alice"} 0.0' in metrics
            assert 'tessera:key_requests_under_way{key="alice"} 0.0' in metrics


def test_what_the_engine_learns_of_the_key(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO))
    settings = keyed(tmp_path, weight=2.5, max_waiting=9, may_use_priority=True)
    assert call(client, settings, "POST", "/v1/completions", json=ASK, headers=bearing()).status_code == 200
    account = client.submissions[0].account
    assert (account.weight, account.max_waiting, account.outranks) == (2.5, 9, True)
    assert 0 < account.id < 2**63
    assert KEY not in repr(account)
    call(client, settings_for(write_model_folder(tmp_path / "open")), "POST", "/v1/completions", json=ASK)
    assert client.submissions[1].account.id not in (0, account.id), "that of the client's address"


def test_only_keys_that_may_administer_reset_the_prefix_cache(tmp_path: Path) -> None:
    for number, (may, status) in enumerate(((False, 403), (True, 200))):
        client = FakeClient(always(HELLO))
        settings = keyed(tmp_path / str(number), may_administer=may)
        answer = call(client, settings, "POST", "/reset_prefix_cache", headers=bearing())
        assert answer.status_code == status
        assert client.num_resets == (status == 200)
    assert call(client, settings_for(write_model_folder(tmp_path)), "POST", "/reset_prefix_cache").status_code == 200


def test_one_key_s_prefixes_are_forgotten(tmp_path: Path) -> None:
    client = FakeClient(always(HELLO))
    settings = keyed(tmp_path, may_administer=True)
    call(client, settings, "POST", "/v1/completions", json=ASK, headers=bearing())
    assert call(client, settings, "POST", "/reset_prefix_cache?key=alice", headers=bearing()).status_code == 200
    assert client.reset_accounts is not None
    assert client.submissions[0].account.id in client.reset_accounts
    call(client, settings, "POST", "/reset_prefix_cache?key=bob", headers=bearing())
    assert client.submissions[0].account.id not in client.reset_accounts
    call(client, settings, "POST", "/reset_prefix_cache", headers=bearing())
    assert client.reset_accounts is None
    for wrong in ("", "a/b", "a" * 65):
        answer = call(client, settings, "POST", f"/reset_prefix_cache?key={wrong}", headers=bearing())
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("key must be the name of a key: at most 64 letters")
    assert client.num_resets == 3


def test_the_log_names_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tessera.request")
    call(FakeClient(always(HELLO)), keyed(tmp_path), "POST", "/v1/completions", json=ASK, headers=bearing())
    (record,) = [record for record in caplog.records if record.name == "tessera.request"]
    assert record.fields["key"] == "alice"  # type: ignore[attr-defined]
    assert KEY not in caplog.text


# ---- memory -------------------------------------------------------------------------------------


def test_fault_overload_short_memory_refuses_before_the_kernel_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.app.limits.memory_watermark.available_memory", lambda: 2**20)
    client = FakeClient(always(HELLO))
    settings = settings_for(write_model_folder(tmp_path))
    answer = call(client, settings, "POST", "/v1/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "out_of_memory")
    assert "retry-after" in answer.headers
    assert call(client, settings, "GET", "/health").status_code == 200
    assert client.submissions == []


def test_a_containers_limit_counts_without_what_only_caches_files(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:     4000 kB\n")
    assert available_memory(meminfo, tmp_path / "none") == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 100000\ninactive_file 200000\n")
    assert available_memory(meminfo, tmp_path) == 800000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 4000 * 1024
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


def test_a_containers_quota_bounds_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for quota, cores in (("max", 16), ("250000", 2), ("50000", 1), ("9900000", 16)):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert num_cores(tmp_path) == cores
    assert num_cores(tmp_path / "none") == 16


def test_the_file_that_is_written_is_yaml(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = add_key(file, "alice", {"tokens_per_minute": 5})
    add_key(file, "bob", {})
    revoke_key(file, "bob")
    assert yaml.safe_load(file.read_text()) == {
        "keys": [{"name": "alice", "sha256": [digest_of(key)], "tokens_per_minute": 5}]
    }
