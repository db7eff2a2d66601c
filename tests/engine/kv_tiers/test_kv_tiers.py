"""KV blocks come back from host memory and from disk as they were; a fault costs time, never a request or a token."""

from __future__ import annotations

import logging
import os
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tessera.engine.ipc.loaded_engine import LoadedEngine
from tessera.engine.kv_tiers.tiers import KVTiers
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, build

CLIENT = b"client"
BLOCK_SIZE, NUM_BLOCKS = 8, 10  # of the device: one conversation at a time
MIB = 2**20
NUM_CONVERSATIONS = 4
MAX_LEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


class Server:
    """An engine on the CPU with a small KV cache."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": NUM_BLOCKS,
            "max_model_len": MAX_LEN,
            "max_num_seqs": 4,
        }
        self.engine: LoadedEngine = load_engine(
            EngineConfig(model=str(folder), **{**defaults, **settings}), lambda stage, done, total: None
        )
        assert isinstance(self.engine.core, EngineCore)
        self.core: EngineCore = self.engine.core
        self._number = 0

    @property
    def tiers(self) -> KVTiers:
        tiers = self.core.block_manager.tiers
        assert tiers is not None
        return tiers

    def submit(self, prompt: list[int], max_tokens: int = 4) -> str:
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add_request(AddRequest(f"r{self._number}", array("i", prompt), params, time.monotonic()), CLIENT)
        return f"r{self._number}"

    def run(self) -> dict[str, tuple[list[int], int]]:
        """-> each request's tokens, and how many of its prompt were cached."""
        found: dict[str, tuple[list[int], int]] = {}
        deadline = time.monotonic() + 30
        while self.core.has_work:
            assert time.monotonic() < deadline, "still not done"
            for output in self.core.step().get(CLIENT, []):
                assert output.error is None
                before, _ = found.get(output.request_id, ([], 0))
                found[output.request_id] = before + output.token_ids, output.num_cached_tokens
        return found

    def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        name = self.submit(prompt)
        return self.run()[name]

    def settle(self) -> None:
        """Wait until nothing is under way."""
        deadline = time.monotonic() + 30
        tiers = self.tiers
        tiers.poll()
        while (
            tiers._storing or tiers._write_slots or tiers._reads or (tiers.disk is not None and tiers.disk.is_scanning)
        ):
            assert time.monotonic() < deadline
            time.sleep(0.001)
            tiers.poll()

    def close(self) -> None:
        if self.core.block_manager.tiers is not None:
            self.tiers.close()


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are in MiB here."""
    monkeypatch.setattr("tessera.engine.kv_tiers.make.GIB", MIB)


@pytest.fixture
def serve(folder: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        servers.append(Server(folder, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def conversations() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCAB_SIZE, 40).tolist() for _ in range(NUM_CONVERSATIONS)]


def two_turns(server: Server) -> list[tuple[list[int], int]]:
    """Every conversation's second turn, after all had their first."""
    prompts = conversations()
    firsts = [server.ask(prompt)[0] for prompt in prompts]
    return [server.ask([*prompt, *first, 7, 8]) for prompt, first in zip(prompts, firsts, strict=True)]


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_what_was_evicted_comes_back_with_the_same_tokens(cache: str, serve: Any) -> None:
    without = two_turns(serve(kv_cache_dtype=cache))
    server = serve(kv_offload_gib=1.0, kv_cache_dtype=cache)
    found = two_turns(server)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in without]
    assert [cached for _, cached in found] == [40] * NUM_CONVERSATIONS
    assert sum(cached for _, cached in without) < 80
    text = server.engine.render_metrics().decode()
    assert 'tessera:kv_offload_total_bytes_total{model_name="' in text
    assert "tessera:external_prefix_cache_hits_total{" in text
    assert server.tiers.metrics.num_hits >= 120
    assert server.engine.info.num_host_kv_blocks == server.tiers.pool.num_slots > NUM_BLOCKS


def test_host_memory_is_bounded_and_keeps_what_was_used_last(serve: Any) -> None:
    num_slots = 7
    block = serve(kv_offload_gib=1.0).tiers._copies.slot_bytes
    server = serve(kv_offload_gib=(num_slots * block + 1) / MIB)
    two_turns(server)
    assert len(server.tiers.pool.kept) <= server.tiers.pool.num_slots == num_slots


def test_a_preempted_request_goes_on_where_it_was(serve: Any) -> None:
    """What it had computed is not computed again, not even its last and incomplete block."""
    prompts = [prompt[:30] for prompt in conversations()[:2]]

    def run(server: Server) -> tuple[list[list[int]], int]:
        names = [server.submit(prompt, max_tokens=30) for prompt in prompts]
        found = server.run()
        assert server.core.metrics.num_preemptions > 0
        return [found[name][0] for name in names], round(server.core.metrics.iteration_tokens.total)

    expected, num_recomputed = run(serve())
    tokens, num_computed = run(serve(kv_offload_gib=1.0))
    assert tokens == expected
    assert num_computed == sum(30 + 30 - 1 for _ in prompts) < num_recomputed
    assert run(serve(kv_offload_gib=1.0, prefix_caching=False)) == (expected, num_computed)


def test_a_restart_finds_what_is_on_disk(serve: Any, tmp_path: Path) -> None:
    settings = {"kv_offload_gib": 0.05, "kv_offload_dir": str(tmp_path / "kv"), "kv_offload_disk_gib": 10.0}
    first = serve(**settings)
    assert first.tiers.pool.num_slots < 30
    expected = two_turns(first)
    first.settle()
    first.close()
    assert first.tiers.disk is not None
    num_left = len(first.tiers.disk.entries)
    assert num_left
    files = list((tmp_path / "kv").rglob("*.kv"))
    assert len(files) == num_left
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)

    second = serve(**settings)
    second.settle()
    assert second.tiers.disk is not None
    assert len(second.tiers.disk.entries) == num_left
    found = two_turns(second)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert second.tiers.metrics.num_bytes["disk_to_CPU"] > 0


def test_another_block_size_or_dtype_or_other_weights_never_read_them(serve: Any, folder: Path, tmp_path: Path) -> None:
    settings = {"kv_offload_gib": 0.05, "kv_offload_dir": str(tmp_path / "kv")}
    first = serve(**settings)
    two_turns(first)
    first.settle()
    first.close()
    left = set((tmp_path / "kv").rglob("*.kv"))
    assert left
    for other in ({"block_size": 16}, {"kv_cache_dtype": "fp8"}):
        serve(**settings, **other).settle()
        assert set((tmp_path / "kv").rglob("*.kv")) == left, f"{other} has another folder"
    weights = next(folder.glob("*.safetensors"))
    times = weights.stat()
    try:
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        changed = serve(**settings)
        changed.settle()
        assert changed.tiers.disk is not None
        assert not changed.tiers.disk.entries
        assert not set((tmp_path / "kv").rglob("*.kv")) & left
    finally:
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_weights_that_were_quantised_while_loading_never_read_them(serve: Any, tmp_path: Path) -> None:
    settings = {"kv_offload_gib": 0.05, "kv_offload_dir": str(tmp_path / "kv")}
    first = serve(**settings)
    two_turns(first)
    first.settle()
    first.close()
    expected = two_turns(serve(quantization="fp8"))
    second = serve(**settings, quantization="fp8")
    second.settle()
    assert second.tiers.disk is not None
    assert not second.tiers.disk.entries
    assert [tokens for tokens, _ in two_turns(second)] == [tokens for tokens, _ in expected]


def test_a_corrupt_block_is_a_miss_and_is_said_once(
    serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"kv_offload_gib": 0.05, "kv_offload_dir": str(tmp_path / "kv")}
    first = serve(**settings)
    expected = two_turns(first)
    first.settle()
    first.close()
    for number, path in enumerate(sorted((tmp_path / "kv").rglob("*.kv"))):
        data = bytearray(path.read_bytes())
        data[-1 - number] ^= 1
        path.write_bytes(data[: -(number % 3 == 2)] if number % 3 == 2 else data)
    with caplog.at_level(logging.WARNING, "tessera.engine"):
        second = serve(**settings)
        second.settle()
        found = two_turns(second)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert second.tiers.metrics.failures["corrupt"] > 1
    assert sum("cannot be used" in record.getMessage() for record in caplog.records) == 1


def test_a_full_disk_is_said_once_and_costs_nothing_else(
    serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tessera.engine.kv_tiers.block_files._write_all", full)
    expected = two_turns(serve())
    with caplog.at_level(logging.WARNING, "tessera.engine"):
        server = serve(kv_offload_gib=0.05, kv_offload_dir=str(tmp_path / "kv"))
        found = two_turns(server)
        server.settle()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
    assert 'kv_offload_up{model_name="' in server.engine.render_metrics().decode()
    assert server.tiers.metrics.gauges()["up"] == {"host": 1, "disk": 0}
    assert not list((tmp_path / "kv").rglob("*.new"))


def test_without_memory_the_server_goes_on_without(
    serve: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.engine.kv_tiers.make.available_memory", lambda: MIB)
    with caplog.at_level(logging.WARNING, "tessera.engine"):
        server = serve(kv_offload_gib=65536.0)
    assert server.core.block_manager.tiers is None
    assert server.engine.info.num_host_kv_blocks == 0
    (record,) = [record for record in caplog.records if "--kv-offload-gib" in record.getMessage()]
    assert "are available" in record.getMessage()
    assert 'tier="host"} 0.0' in server.engine.render_metrics().decode()
    assert server.ask([5] * 20)[0]


def test_two_servers_never_share_a_folder(serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"kv_offload_gib": 1.0, "kv_offload_dir": str(tmp_path / "kv")}
    assert serve(**settings).tiers.disk is not None
    with caplog.at_level(logging.WARNING, "tessera.engine"):
        assert serve(**settings).tiers.disk is None
    assert "another server uses it" in caplog.text


def test_a_reset_and_a_key_s_wipe_reach_every_tier(serve: Any, tmp_path: Path) -> None:
    server = serve(kv_offload_gib=0.05, kv_offload_dir=str(tmp_path / "kv"))
    prompt = conversations()[0]
    two_turns(server)
    server.settle()
    server.core.reset_prefix_cache([77])
    assert server.ask([*prompt, 9])[1] == 40, "another account's"
    server.core.reset_prefix_cache([0])
    assert server.ask([*prompt, 9])[1] == 0
    server.core.reset_prefix_cache()
    server.settle()
    server.tiers.close()
    assert not server.tiers.pool.kept
    assert not list((tmp_path / "kv").rglob("*.kv"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_gib": 0.0}, "--kv-offload-gib must be a number from 0.001"),
        ({"kv_offload_dir": "x"}, "--kv-offload-dir needs --kv-offload-gib"),
        ({"kv_offload_gib": 1.0, "kv_offload_disk_gib": 1.0}, "--kv-offload-disk-gib needs --kv-offload-dir"),
    ],
)
def test_options_that_cannot_work_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="x", **settings).verify()
