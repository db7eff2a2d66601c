"""The whole engine on the GPU: one step ahead of its results, from recorded steps, and never another token for it."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tests.support.fakes.fake_runner import check_blocks
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, build

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_device")]

CLIENT = b"test"
Requests = dict[str, tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "qwen3", "qwen2-window", "gpt2", "phi3-longrope-long")
    return {name: build(TINY_MODELS[name], tmp_path_factory.mktemp(name)) for name in names}


def load_core(folder: Path, **settings: Any) -> EngineCore:
    defaults = {"device": "cuda", "dtype": "float32", "block_size": 8, "num_kv_blocks": 256}
    config = EngineConfig(model=str(folder), **{**defaults, **settings})
    core = load_engine(config, lambda stage, done, total: None).core
    assert isinstance(core, EngineCore)
    return core


def requests_of(seed: int, count: int = 16) -> Requests:
    """Greedy, seeded, filtered and penalised by turns; some with a common beginning."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    beginning = rng.integers(3, VOCAB_SIZE, 20).tolist()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 30},
        {"temperature": 1.2, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 4},
    ]
    requests = {}
    for index in range(count):
        prompt = (beginning if index % 3 == 0 else []) + rng.integers(3, VOCAB_SIZE, 1 + int(rng.integers(18))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(8, 20)), ignore_eos=True, seed=index, **kinds[index % len(kinds)]
        )
        requests[f"r{index}"] = (prompt, params)
    return requests


def run(core: EngineCore, requests: Requests, stagger: int = 0) -> dict[str, list[int]]:
    """Every request's tokens; one enters every `stagger` steps (0: all at once)."""
    found: dict[str, list[int]] = {name: [] for name in requests}
    coming = list(requests.items())
    num_calls = 0
    while coming or core.has_work:
        if coming and (stagger == 0 or num_calls % stagger == 0):
            name, (token_ids, params) = coming.pop(0)
            core.add_request(AddRequest(name, array("i", token_ids), params, time.monotonic()), CLIENT)
            if stagger == 0:
                continue
        num_calls += 1
        assert num_calls < 5000, "still not done"
        for output in core.step().get(CLIENT, []):
            assert output.error is None
            found[output.request_id] += output.token_ids
        check_blocks(core)
    assert core.stats().num_used_blocks == 0
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-window", "gpt2", "phi3-longrope-long"])
def test_a_request_gets_the_same_tokens_alone_and_among_sixteen(folders: dict[str, Path], name: str) -> None:
    requests = requests_of(seed=7)
    core = load_core(folders[name], prefix_caching=False)
    alone: dict[str, list[int]] = {}
    for request_id, request in requests.items():
        alone |= run(core, {request_id: request})
    assert {key: len(tokens) for key, tokens in alone.items()} == {
        key: params.max_tokens for key, (_, params) in requests.items()
    }
    assert run(core, requests) == alone
    assert run(core, requests, stagger=3) == alone
    assert run(core, requests, stagger=1) == alone, "short prompts beside many decodes"


def test_short_and_long_sequences_of_longrope_are_those_of_the_cpu(folders: dict[str, Path]) -> None:
    """Prompt and max_tokens decide on the factors, also of sequences with the same beginning; 16 tokens are short."""
    beginning = list(range(3, 14))
    requests = {
        f"{length}-{max_tokens}": (
            beginning[:length] + list(range(40, 40 + length - len(beginning))),
            SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        for length, max_tokens in ((10, 6), (10, 7), (11, 5), (11, 30), (30, 10), (16, 1), (4, 12))
    }
    expected = run(load_core(folders["phi3-longrope-long"], device="cpu"), requests)
    assert expected["10-6"] != expected["10-7"][:6], "the forms must tell apart for this test to say anything"
    for settings in ({}, {"enforce_eager": True}, {"prefix_caching": False}):
        core = load_core(folders["phi3-longrope-long"], **settings)
        assert run(core, requests) == run(core, requests, stagger=1) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 17, "max_num_seqs": 16},
        {"num_kv_blocks": 24, "max_num_seqs": 7},
        {"prefix_caching": False, "max_num_seqs": 5},
    ],
    ids=lambda settings: ",".join(settings) or "the same",
)
def test_no_way_of_scheduling_changes_a_token(folders: dict[str, Path], settings: dict[str, Any]) -> None:
    requests = requests_of(seed=8, count=40)
    expected = run(load_core(folders["qwen3"]), requests)
    assert run(load_core(folders["qwen3"], **settings), requests, stagger=1) == expected


def test_in_half_precision_a_batch_rarely_changes_a_token(folders: dict[str, Path]) -> None:
    """Kernels of different sizes round sums differently, which may tip a token that is as good as another."""
    requests = {
        f"r{index}": (list(range(3 + index, 30)), SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True))
        for index in range(8)
    }
    core = load_core(folders["qwen3"], dtype="bfloat16", prefix_caching=False)
    alone: dict[str, list[int]] = {}
    for request_id, request in requests.items():
        alone |= run(core, {request_id: request})
    together = run(core, requests)
    assert sum(alone[key] == together[key] for key in requests) >= 6
    assert run(core, requests) == together, "the same batch gives the same tokens"
