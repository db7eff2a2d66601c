"""What is promised of drafts, for every method whose drafts a model computes: requests get what they get without.

Drafters of random models are seldom right. Here they are in seven of ten tokens, as trained ones may be.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.speculation.settings import MODEL_METHODS
from tessera.engine.core.core import EngineCore
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.ipc.process import load_engine
from tessera.engine.models.config import load_config
from tessera.engine.runner.model_runner import ModelRunner
from tests.support.speculation import (
    CLIENT,
    Asked,
    Told,
    ask_all,
    assert_same,
    make_core,
    make_runner,
    num_accepted,
    repeated,
    varied_requests,
)
from tests.support.tiny_adapters import TinyAdapter
from tests.support.tiny_eagle3 import write_head
from tests.support.tiny_predictor import write_model
from tests.support.token_ids import token_ids

RATE = 0.7
ASKED = varied_requests(128, 16)


class Served:
    """A model with a drafter of each method, and what its requests get without."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "served"
        write_model(self.folder, "mimo")
        model = load_config(self.folder)
        write_head(root / "head", model.hidden_size, model.vocab_size, 50)
        self._folders = {"draft_model": str(self.folder), "eagle3": str(root / "head"), "mtp": None}
        self._runners: dict[str, ModelRunner] = {}
        self.expected = ask_all(make_core(self.folder), ASKED)

    def settings(self, method: str, **changed: Any) -> dict[str, Any]:
        drafts = {"speculation": "on", "speculative_method": method, "speculative_model": self._folders[method]}
        return {**drafts, "max_num_seqs": 6, **changed}

    def core(self, method: str, texts: list[list[int]], **changed: Any) -> EngineCore:
        """With a drafter that knows the `texts` of the requests by their numbers."""
        if method not in self._runners:
            self._runners[method] = make_runner(self.folder, **self.settings(method))
        core = make_core(self.folder, self._runners[method], **self.settings(method, **changed))
        tell_texts(core, self._runners[method], texts)
        return core

    def texts(self) -> list[list[int]]:
        return [[*asked.prompt, *told.token_ids] for asked, told in zip(ASKED, self.expected, strict=True)]


def tell_texts(core: EngineCore, runner: ModelRunner, texts: list[list[int]]) -> None:
    """Have the drafter say what comes, in RATE of the tokens."""
    drafter, rng = runner.drafter, random.Random(5)
    assert isinstance(drafter, DraftModel)
    choose = type(drafter)._choose

    def choose_rightly(running: Any) -> Any:
        chosen = choose(drafter, running)
        sampling = running.batch.sampling
        numbers = {each.slot: int(each.request_id) for each in core.scheduler.running}
        for row, (slot, position) in enumerate(zip(sampling.slots.tolist(), sampling.positions.tolist(), strict=True)):
            text = texts[numbers[slot] % len(texts)]
            if position < len(text) and rng.random() < RATE:
                chosen.numpy()[row] = text[position]
        return chosen

    drafter._choose = choose_rightly  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("promises"))


@pytest.mark.parametrize("method", MODEL_METHODS)
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({}, id="at once"),
        pytest.param({"num_kv_blocks": 10, "max_num_batched_tokens": 16}, id="preempted, prompts in chunks"),
    ],
)
def test_requests_get_what_they_get_without(served: Served, method: str, changed: dict[str, Any]) -> None:
    """Greedy and seeded, with log-probabilities, penalties, filters, stop tokens, bad words and least tokens."""
    core = served.core(method, served.texts(), **changed)
    told = ask_all(core, ASKED, at_once=3)
    assert_same(told, served.expected)
    assert num_accepted(told) > 40
    assert (core.metrics.num_preemptions > 0) == bool(changed)
    assert core.stats().num_used_blocks == 0
    speculator = core.metrics.speculator
    assert speculator is not None
    by_position = speculator.num_accepted_by_position
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == num_accepted(told) == speculator.by_source[method].num_accepted


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_from_the_prefix_cache(served: Served, method: str) -> None:
    core = served.core(method, served.texts())
    ask_all(core, ASKED[:4])
    told = ask_all(core, ASKED[:4])
    assert_same(told, served.expected[:4])
    assert all(each.last is not None and each.last.num_cached_tokens for each in told)
    assert num_accepted(told) > 10


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_aborted_requests_leave_the_others_as_they_are(served: Served, method: str) -> None:
    core = served.core(method, served.texts()[:4])
    for number, each in enumerate([*ASKED[:4], *ASKED[:4]]):
        core.add_request(AddRequest(str(number), token_ids(each.prompt), each.params, 0.0), CLIENT)
    found: dict[str, list[int]] = {str(number): [] for number in range(8)}
    for step in range(200):
        if step == 3:
            core.abort(["4", "5", "6", "7"], CLIENT)
        for output in core.step().get(CLIENT, []):
            found[output.request_id] += output.token_ids
        if not core.has_work:
            break
    assert [found[str(number)] for number in range(4)] == [each.token_ids for each in served.expected[:4]]
    assert core.stats().num_used_blocks == 0


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_beside_adapters(served: Served, method: str, tmp_path: Path) -> None:
    """An adapter concerns the served model, and so the hidden states that heads read."""
    projections = {f"model.layers.{layer}.self_attn.{name}_proj": (64, 64) for layer in range(3) for name in "qo"}
    adapter = TinyAdapter(projections, seed=3)
    folder = adapter.write(tmp_path / "adapter")
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    asked = [Asked(repeated(number, 128, 20), params, adapter=name) for number, name in enumerate(("", "a", "a"))]
    limits: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 64, "block_size": 8, "lora": (f"a={folder}",)}
    found: list[list[Told]] = []
    for settings in ({"max_num_seqs": 6}, served.settings(method)):
        engine = load_engine(EngineConfig(model=str(served.folder), **limits, **settings), lambda *_: None)
        assert isinstance(engine.core, EngineCore)
        runner = engine.core._runner._runner  # type: ignore[attr-defined]
        if found:
            pairs = zip(asked, found[0], strict=True)
            tell_texts(engine.core, runner, [[*each.prompt, *told.token_ids] for each, told in pairs])
        found.append(ask_all(engine.core, asked))
    assert_same(found[1], found[0])
    assert num_accepted(found[1]) > 10
    plain = ask_all(make_core(served.folder), [Asked(each.prompt, params) for each in asked])
    assert [one.token_ids != other.token_ids for one, other in zip(found[0], plain, strict=True)] == [False, True, True]
