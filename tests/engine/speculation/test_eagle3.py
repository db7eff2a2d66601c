"""An EAGLE-3 head drafts what its definition says, and requests get the tokens that they get without."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.drafters.eagle3 import Eagle3
from tessera.engine.drafters.eagle3_config import read_eagle3
from tessera.engine.drafters.make import make_drafter
from tessera.engine.ipc.load import load_engine
from tessera.engine.models.config import load_config
from tessera.engine.ops.interface import AttentionMetadata
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, Tensor
from tests.support.models.tiny_eagle3 import add_tensor, reference_drafts, write_as_speculators, write_head
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.speculation import (
    Asked,
    ask_all,
    make_core,
    make_runner,
    repeated,
    watched_drafts,
)

DRAFT_VOCAB = 50
DRAFTING: dict[str, Any] = {"speculation": "on", "speculative_method": "eagle3", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any], ModelRunner]:
    """Folders of a model and of a head, the head's tensors, and a runner."""
    root = tmp_path_factory.mktemp("eagle")
    folder = build(TINY_MODELS["llama"], root / "served")
    model = load_config(folder)
    head = write_head(root / "head", model.hidden_size, model.vocab_size, DRAFT_VOCAB)
    return folder, root / "head", head, make_runner(folder, **DRAFTING, speculative_model=str(root / "head"))


def test_its_drafts_are_those_of_its_definition(made: tuple[Path, Path, dict[str, Any], ModelRunner]) -> None:
    folder, head_folder, head, runner = made
    drafter, model = runner.drafter, runner.model
    assert isinstance(drafter, Eagle3)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    core = make_core(folder, runner, **DRAFTING, speculative_model=str(head_folder))
    with watched_drafts(drafter, core) as found:
        prompt = repeated(4, model.vocab_size, 12)
        [told] = ask_all(core, [Asked(prompt, params)])

    states: dict[int, Any] = {}
    plain = make_runner(folder)

    def keep(layer: int, stream: Tensor, metadata: AttentionMetadata) -> None:
        states[layer] = stream.numpy().copy()

    for layer in range(model.num_layers):
        plain.decoder.tap(layer, partial(keep, layer))
    text = [*prompt, *told.token_ids]
    ask_all(make_core(folder, plain), [Asked(text, SamplingParams(max_tokens=1, temperature=0.0))])
    three = sorted((min(2, model.num_layers - 1), model.num_layers // 2, max(model.num_layers - 3, 0)))
    together = np.concatenate([states[layer] for layer in three], axis=1)
    embedding = plain.weights.embedding.dense
    assert embedding is not None
    assert len(found) > 10
    for known, drafts in found:
        expected = reference_drafts(head, embedding.numpy(), together[: len(known) - 1], known, len(drafts))
        assert drafts == expected
    assert {token for _, drafts in found for token in drafts} <= set(head["tokens"].tolist())


def test_a_head_in_the_form_of_the_speculators_library_drafts_the_same(
    made: tuple[Path, Path, dict[str, Any], ModelRunner], tmp_path: Path
) -> None:
    folder, head_folder, _, runner = made
    layers = list(read_eagle3(head_folder, runner.model).feature_layers)
    write_as_speculators(head_folder, tmp_path / "head", eagle_aux_hidden_state_layer_ids=layers)
    add_tensor(tmp_path / "head" / "model.safetensors", "t2d", np.zeros(runner.model.vocab_size, np.int64))
    drafts = []
    for head in (head_folder, tmp_path / "head"):
        settings = {**DRAFTING, "speculative_model": str(head)}
        drafting = runner if head == head_folder else make_runner(folder, **settings)
        assert isinstance(drafting.drafter, Eagle3)
        core = make_core(folder, drafting, **settings)
        with watched_drafts(drafting.drafter, core) as found:
            ask_all(core, [Asked(repeated(2, 100, 12), SamplingParams(max_tokens=20, temperature=0.0))])
        drafts.append(found)
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 5


def test_layers_are_named_by_their_inputs_or_in_eagle_config_by_their_outputs(
    made: tuple[Path, Path, dict[str, Any], ModelRunner], tmp_path: Path
) -> None:
    _, head_folder, _, runner = made
    values = json.loads((head_folder / "config.json").read_text())

    def layers(**changed: Any) -> tuple[int, ...]:
        (tmp_path / "config.json").write_text(json.dumps({**values, **changed}))
        return read_eagle3(tmp_path, runner.model).feature_layers

    assert layers(eagle_aux_hidden_state_layer_ids=[0, 1, 2]) == (0, 1, 2)
    assert layers(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}) == (1, 1, 2)
    assert layers(architectures=["LlamaForCausalLM"]) == layers()
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids must be 3 of the"):
        layers(eagle_aux_hidden_state_layer_ids=[0, 1, runner.model.num_layers])


def test_a_head_with_more_to_it_is_refused(
    made: tuple[Path, Path, dict[str, Any], ModelRunner], tmp_path: Path
) -> None:
    folder, head_folder, _, _ = made
    write_as_speculators(head_folder, tmp_path / "norm", norm_before_fc=True)
    with pytest.raises(ConfigError, match="norm is of another kind: norm_before_fc is not supported"):
        make_runner(folder, **DRAFTING, speculative_model=str(tmp_path / "norm"))
    write_as_speculators(head_folder, tmp_path / "biased")
    bias = "layers.0.self_attn.q_proj.bias"
    add_tensor(tmp_path / "biased" / "model.safetensors", bias, np.zeros(4, np.int64))
    with pytest.raises(ConfigError, match=f"biased is of another kind: its tensor {bias} has no use"):
        make_runner(folder, **DRAFTING, speculative_model=str(tmp_path / "biased"))


def test_features_have_a_part_of_the_memory(made: tuple[Path, Path, dict[str, Any], ModelRunner]) -> None:
    folder, head_folder, _, _ = made
    limits: dict[str, Any] = {"cpu_kv_cache_gib": 0.001, "max_num_seqs": 64, "device": "cpu"}
    plain = load_engine(EngineConfig(model=str(folder), **limits), lambda *_: None)
    settings: dict[str, Any] = {"speculative_config": {"method": "eagle3", "model": str(head_folder)}}
    engine = load_engine(EngineConfig(model=str(folder), **limits, **settings), lambda *_: None)
    info = engine.info
    assert info.draft is not None
    assert info.kv_cache_bytes + info.draft.kv_cache_bytes <= plain.info.kv_cache_bytes
    assert info.num_kv_blocks < plain.info.num_kv_blocks
    assert isinstance(engine.core, EngineCore)
    [told] = ask_all(engine.core, [Asked([3], SamplingParams(max_tokens=20, temperature=0.9, seed=1))])
    assert told.token_ids


def test_wrong_heads_are_refused(made: tuple[Path, Path, dict[str, Any], ModelRunner], tmp_path: Path) -> None:
    folder, head_folder, _, _ = made
    values = json.loads((head_folder / "config.json").read_text())

    def refusal(name: str, **changed: Any) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**values, **changed}))
        config = EngineConfig(model=str(folder), **{**DRAFTING, "speculative_model": str(tmp_path / name)})
        with pytest.raises(ConfigError) as caught:
            make_drafter(config, load_config(folder), make_ops(CPU))
        return str(caught.value).replace(str(tmp_path), "")

    assert refusal("plain", architectures=["LlamaForCausalLM"], draft_vocab_size=None) == (
        "the EAGLE-3 head /plain is of another kind: architectures of its config.json must name an Eagle3 model, or "
        "draft_vocab_size be given"
    )
    assert "is of another kind" in refusal("other", speculators_model_type="dflash")
    assert refusal("wide", hidden_size=128) == (
        "the EAGLE-3 head /wide is for another model: its hidden_size is 128, and the served model's 64"
    )
    assert refusal("words", vocab_size=90) == (
        f"the EAGLE-3 head /words is for another model: its vocab_size is 90, and the served model's "
        f"{load_config(folder).vocab_size}"
    )
    assert refusal("deep", num_hidden_layers=2) == "the EAGLE-3 head /deep must have one layer: num_hidden_layers is 2"
    config = EngineConfig(model=str(folder), **{**DRAFTING, "speculative_model": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match=r"nowhere has no config.json; give a folder with config.json and"):
        make_drafter(config, load_config(folder), make_ops(CPU))


def test_a_head_with_pickled_weights_is_refused(
    made: tuple[Path, Path, dict[str, Any], ModelRunner], tmp_path: Path
) -> None:
    folder, head_folder, _, _ = made
    (tmp_path / "config.json").write_text((head_folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="safetensors"):
        make_runner(folder, **DRAFTING, speculative_model=str(tmp_path))
