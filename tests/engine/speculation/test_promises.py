"""Drafts that a model computes, right in seven of ten tokens, beside aborted requests and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.speculation.settings import MODEL_METHODS, STATE_METHODS
from tessera.engine.core.core import EngineCore
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.ipc.load import load_engine
from tessera.engine.kv_tiers.make import form_of
from tessera.engine.tensor import CPU
from tests.support.cases.token_ids import token_ids
from tests.support.models.drafted_models import random_model, tell_texts
from tests.support.models.tiny_adapters import TinyAdapter
from tests.support.speculation import (
    CLIENT,
    Asked,
    Told,
    ask_all,
    assert_same,
    make_core,
    num_accepted,
    repeated,
    varied_requests,
    watched_drafts,
)

RATE = 0.7
ASKED = varied_requests(128, 16)


class Served:
    """A model with a drafter of each method, and what its requests get without."""

    def __init__(self, root: Path) -> None:
        self.model = random_model(root)
        self.expected = ask_all(self.model.plain_core(), ASKED)

    def texts(self) -> list[list[int]]:
        return [[*asked.prompt, *told.token_ids] for asked, told in zip(ASKED, self.expected, strict=True)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("promises"))


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_aborted_requests_leave_the_others_as_they_are(served: Served, method: str) -> None:
    core = served.model.core(method, served.texts()[:4], RATE)
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
    for settings in ({"max_num_seqs": 6}, served.model.settings(method)):
        engine = load_engine(EngineConfig(model=str(served.model.folder), **limits, **settings), lambda *_: None)
        assert isinstance(engine.core, EngineCore)
        runner = engine.core._runner._runner  # type: ignore[attr-defined]
        if found:
            pairs = zip(asked, found[0], strict=True)
            tell_texts(engine.core, runner, [[*each.prompt, *told.token_ids] for each, told in pairs], RATE)
        found.append(ask_all(engine.core, asked))
    assert_same(found[1], found[0])
    assert num_accepted(found[1]) > 10
    plain = ask_all(make_core(served.model.folder), [Asked(each.prompt, params) for each in asked])
    assert [one.token_ids != other.token_ids for one, other in zip(found[0], plain, strict=True)] == [False, True, True]


@pytest.mark.parametrize("method", MODEL_METHODS)
def test_what_comes_back_from_host_memory_is_drafted_as_before(served: Served, method: str) -> None:
    """What the served model has left for a head comes with the keys and values."""
    limits: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 12, "block_size": 8, "kv_offload_gib": 0.01}
    config = EngineConfig(model=str(served.model.folder), **limits, **served.model.settings(method))
    core = load_engine(config, lambda *_: None).core
    assert isinstance(core, EngineCore)
    drafter = core._runner._runner.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, DraftModel)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    told, drafts = list[Told](), list[Any]()
    for number in (1, 2, 3, 1):
        with watched_drafts(drafter, core) as found:
            told += ask_all(core, [Asked(repeated(number, 128, 50), params)])
        drafts.append(found)
    assert told[-1].last is not None
    assert told[-1].last.num_cached_tokens == 48
    assert core.block_manager.tiers is not None
    assert core.block_manager.tiers.metrics.num_hits > 0
    assert_same(told[-1:], told[:1])
    assert drafts[-1] == drafts[0]
    assert len(drafts[0]) > 1


def test_files_of_blocks_are_a_head_s_own(served: Served) -> None:
    def form(**settings: Any) -> str:
        return form_of(EngineConfig(model=str(served.model.folder), **settings), CPU, 1, "float32")

    assert form() == form(**served.model.settings("draft_model")) == form(**served.model.settings("suffix"))
    assert len({form(), *(form(**served.model.settings(method)) for method in STATE_METHODS)}) == 3
