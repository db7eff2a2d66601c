"""A model's own layer of multi-token prediction drafts what its definition says, and no token changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.drafters.predictor import Predictor
from tessera.engine.ipc.load import load_engine
from tessera.engine.ops.interface import AttentionMetadata
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import Tensor
from tests.support.models.tiny_models import TINY_MODELS, build, write_safetensors
from tests.support.models.tiny_predictor import CONFIGS, Reference, write_model
from tests.support.speculation import (
    Asked,
    ask_all,
    assert_same,
    make_core,
    make_runner,
    num_drafted,
    varied_requests,
    watched_drafts,
)

DRAFTING: dict[str, Any] = {"speculation": "on", "speculative_method": "mtp", "max_num_seqs": 8}

Made = tuple[Path, Reference, ModelRunner]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Of a form: the folder, its layer's reference, a runner with the layer."""
    found: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            reference = Reference(*write_model(folder, name))
            found[name] = folder, reference, make_runner(folder, **DRAFTING)
        return found[name]

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_its_drafts_are_those_of_its_definition(made: Callable[[str], Made], name: str) -> None:
    folder, reference, runner = made(name)
    drafter = runner.drafter
    assert isinstance(drafter, Predictor)
    core = make_core(folder, runner, **DRAFTING)
    with watched_drafts(drafter, core) as found:
        prompt = np.random.default_rng(3).integers(3, 100, 12).tolist()
        params = SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True)
        [told] = ask_all(core, [Asked(prompt, params)])

    states: list[Any] = []
    plain = make_runner(folder)

    def keep(stream: Tensor, metadata: AttentionMetadata) -> None:
        states.append(stream.numpy().copy())

    plain.decoder.tap(plain.model.num_layers, keep)
    text = [*prompt, *told.token_ids]
    ask_all(make_core(folder, plain), [Asked(text, SamplingParams(max_tokens=1, temperature=0.0))])
    assert len(found) > 10
    assert {len(drafts) for _, drafts in found} >= {3}
    for known, drafts in found:
        assert drafts == reference.drafts(states[0][: len(known) - 1], known, len(drafts))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        pytest.param("glm4moe-groups", {"speculation": "auto"}, id="auto"),
        pytest.param("ernie4_5-moe", {"max_num_batched_tokens": 9}, id="prompts in chunks"),
    ],
)
def test_the_tokens_are_those_without_drafts(made: Callable[[str], Made], name: str, changed: dict[str, Any]) -> None:
    folder, _, runner = made(name)
    asked = varied_requests(runner.model.vocab_size, 20)
    plain = make_runner(folder, max_num_seqs=8)
    expected = ask_all(make_core(folder, plain), asked)
    core = make_core(folder, runner, **{**DRAFTING, **changed})
    told = ask_all(core, asked, at_once=3)
    assert_same(told, expected)
    assert num_drafted(told) > (0 if changed.get("speculation") == "auto" else 100)
    assert core.stats().num_used_blocks == 0


@pytest.mark.parametrize("name", ["mimo", "glm4moe-groups"])
def test_a_rounded_layer_drafts(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, name)
    limits: dict[str, Any] = {"cpu_kv_cache_gib": 0.002, "device": "cpu", "quantization": "fp8"}
    engine = load_engine(EngineConfig(model=str(tmp_path), **DRAFTING, **limits), lambda *_: None)
    assert isinstance(engine.core, EngineCore)
    [told] = ask_all(engine.core, [Asked([3, 4, 5], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))])
    assert num_drafted([told]) > 9


def test_the_layer_has_a_part_of_the_memory(made: Callable[[str], Made]) -> None:
    folder, _, runner = made("mimo")
    limits: dict[str, Any] = {"cpu_kv_cache_gib": 0.001, "device": "cpu", "max_num_seqs": 64}
    plain = load_engine(EngineConfig(model=str(folder), **limits), lambda *_: None)
    asked = {**DRAFTING, **limits, "load_format": "dummy"}
    engine = load_engine(EngineConfig(model=str(folder), **asked), lambda *_: None)
    info, width, layers = engine.info, runner.model.hidden_size, runner.model.num_layers
    assert info.draft is not None
    assert info.kv_cache_bytes + info.draft.kv_cache_bytes <= plain.info.kv_cache_bytes
    assert info.num_kv_blocks < plain.info.num_kv_blocks * layers / (layers + 1)
    embedding_and_head = 2 * runner.model.vocab_size * width
    own = (info.num_parameters - embedding_and_head) / layers + 2 * width * width
    assert info.draft.num_parameters == pytest.approx(own, rel=0.01), "embedding and head are the model's"
    assert info.draft.num_tokens == 3


def test_it_is_not_read_without_the_method(made: Callable[[str], Made], caplog: pytest.LogCaptureFixture) -> None:
    folder, _, runner = made("glm4moe-groups")
    caplog.clear()
    plain = make_runner(folder)
    assert not caplog.records, "nothing is said to be left out"
    assert plain.num_parameters == runner.num_parameters


def test_models_without_such_a_layer_are_refused(tmp_path: Path) -> None:
    def refusal(folder: Path, **settings: Any) -> str:
        with pytest.raises((ConfigError, ModelError)) as caught:
            make_runner(folder, **DRAFTING, **settings)
        return str(caught.value).replace(str(tmp_path), "")

    plain = build(TINY_MODELS["qwen2"], tmp_path / "plain")
    assert refusal(plain) == (
        "the speculative method mtp needs a model with layers of multi-token prediction, which config.json counts in "
        "num_nextn_predict_layers; /plain has none. They are read from models of Ernie4_5_MoeForCausalLM, "
        "Glm4MoeForCausalLM, MiMoForCausalLM"
    )
    _, tensors = write_model(tmp_path / "cut", "glm4moe-groups")
    kept = {name: tensor for name, tensor in tensors.items() if "eh_proj" not in name}
    write_safetensors(tmp_path / "cut" / "model.safetensors", kept)
    assert refusal(tmp_path / "cut") == (
        "/cut lacks the tensor model.layers.2.eh_proj.weight, which config.json calls for"
    )
    write_model(tmp_path / "zero", "mimo", num_nextn_predict_layers=0)
    assert "/zero has none" in refusal(tmp_path / "zero")
    write_model(tmp_path / "sparse", "ernie4_5-moe", moe_layer_start_index=0)
    assert refusal(tmp_path / "sparse") == (
        "/sparse: its layer of multi-token prediction has a dense MLP, and no other layer has"
    )
