"""Signals: SIGHUP, which ends a process by default, reads the API keys again; so does a change of the keys file."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

from tessera.app.cli.keys_command import add_key, revoke_key
from tests.support.servers.server_fixture import Server, running_server

NUM_ALLOWED = 10


def status_with(server: Server, key: str) -> int:
    return server.http.get("/v1/models", headers={"authorization": f"Bearer {key}", "connection": "close"}).status_code


def post_with(server: Server, key: str) -> int:
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    return server.http.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code


def num_cached(server: Server, key: str) -> int:
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    body = {"model": "tessera-builtin", "prompt": list(range(10, 60)), "max_tokens": 1}
    usage = server.http.post("/v1/completions", json=body, headers=headers).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def ignores_sighup(pid: int) -> bool:
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) & 1 << signal.SIGHUP - 1)


def test_fault_signals_sighup_reads_the_keys_again(tmp_path: Path) -> None:
    """In every app process; a file that cannot be used leaves the keys as they were."""
    keys = tmp_path / "keys"
    keys.write_text("old\nstays\n")
    named = tmp_path / "keys.yaml"
    limited = add_key(named, "limited", {"requests_per_minute": NUM_ALLOWED})
    arguments = ("--api-key-file", str(keys), "--api-keys-file", str(named), "--api-workers", "2")
    with running_server(None, tmp_path / "log", *arguments) as server:
        (worker,) = server.until(lambda: server.children("tessera.app.server.worker"), "the worker")
        engine = server.engine_pid()
        assert engine is not None
        server.until(lambda: ignores_sighup(worker) and ignores_sighup(engine), "both to have begun")
        assert (status_with(server, "old"), status_with(server, "new")) == (200, 401)
        keys.write_text("new\nstays\n")
        for pid in (worker, engine, server.process.pid):
            os.kill(pid, signal.SIGHUP)
        server.until(lambda: "3 API keys are accepted from now on" in server.log, "the new keys")
        server.until(lambda: all(status_with(server, "old") == 401 for _ in range(20)), "both processes to know")
        assert {status_with(server, key) for key in ("new", "stays") for _ in range(20)} == {200}

        statuses = Counter(post_with(server, limited) for _ in range(4 * NUM_ALLOWED))
        assert statuses.keys() == {200, 429}
        assert NUM_ALLOWED <= statuses[200] <= 2 * NUM_ALLOWED, "both processes count together, but a minute may end"
        late = add_key(named, "late", {})
        server.until(lambda: all(status_with(server, late) == 200 for _ in range(20)), "the keys file to be read again")
        assert [num_cached(server, late) for _ in range(2)] == [0, 48]
        revoke_key(named, "late")
        server.until(lambda: all(status_with(server, late) == 401 for _ in range(20)), "the revocation")
        again = add_key(named, "late", {})
        server.until(lambda: all(status_with(server, again) == 200 for _ in range(20)), "the name's new key")
        assert num_cached(server, again) == 0, "what a revoked key has computed is forgotten"

        keys.write_text("# none\n")
        os.kill(server.process.pid, signal.SIGHUP)
        server.until(lambda: "the API keys stay as they were" in server.log, "the complaint")
        assert status_with(server, "new") == 200

        os.kill(worker, signal.SIGKILL)
        server.until(lambda: server.children("tessera.app.server.worker") not in ([], [worker]), "another worker")
        assert {status_with(server, "old") for _ in range(20)} == {401}
        assert server.engine_pid() == engine


def test_fault_signals_sighup_ends_no_server_without_keys(tmp_path: Path) -> None:
    with running_server(None, tmp_path / "log") as server:
        os.kill(server.process.pid, signal.SIGHUP)
        server.until(lambda: "there are no API keys to read again" in server.log, "the line of the log")
        assert server.http.get("/health").status_code == 200
