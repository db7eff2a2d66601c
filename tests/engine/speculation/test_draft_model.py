"""A second model that drafts: a request gets the tokens that it gets without, from real forwards on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.drafters.make import make_drafter
from tessera.engine.ipc.load import load_engine
from tessera.engine.models.config import load_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.step_inputs import StepInputs
from tessera.engine.tensor import CPU, Tensor
from tests.engine.runner.recorder import Recorder
from tests.support.models.tiny_models import TINY_MODELS, build
from tests.support.speculation import (
    Asked,
    ask_all,
    assert_same,
    make_core,
    make_runner,
    num_accepted,
    repeated,
    varied_requests,
)

NUM_SEQS = 8
DRAFTING: dict[str, Any] = {"speculation": "on", "speculative_method": "draft_model", "max_num_seqs": NUM_SEQS}

Runners = Callable[[str, str], tuple[Path, ModelRunner, dict[str, Any]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            made[name] = build(TINY_MODELS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return folder_of


@pytest.fixture(scope="module")
def runners(folders: Callable[[str], Path]) -> Runners:
    """Of a model and its draft model: the folder, a runner, and the settings that ask for it."""
    made: dict[tuple[str, str], ModelRunner] = {}

    def runner_of(name: str, draft: str) -> tuple[Path, ModelRunner, dict[str, Any]]:
        settings = {**DRAFTING, "speculative_model": str(folders(draft))}
        if (name, draft) not in made:
            made[name, draft] = make_runner(folders(name), **settings)
        return folders(name), made[name, draft], settings

    return runner_of


@pytest.mark.parametrize(
    ("name", "draft", "mode"),
    [("llama", "llama-linear", "auto"), ("llama", "qwen2", "on")],
)
def test_the_tokens_are_those_without_drafts(runners: Runners, name: str, draft: str, mode: str) -> None:
    folder, runner, settings = runners(name, draft)
    asked = varied_requests(runner.model.vocab_size, 24)
    expected = ask_all(make_core(folder, runner), asked)
    told = ask_all(make_core(folder, runner, **{**settings, "speculation": mode}), asked)
    assert_same(told, expected)


def test_its_drafts_are_what_it_says_when_served(runners: Runners, folders: Callable[[str], Path]) -> None:
    """Its own logits are compared with those of transformers in `test_golden_logits`."""
    folder, runner, settings = runners("llama", "llama-linear")
    core = make_core(folder, runner, **settings)
    assert isinstance(runner.drafter, DraftModel)
    found: list[tuple[list[int], list[int]]] = []
    draft = runner.drafter.draft

    def watch(steps: Any) -> Any:
        download = draft(steps)
        [sequence] = core.scheduler.running
        found.append((sequence.token_ids.tolist(), download.result()[: len(steps), sequence.slot].tolist()))
        return download

    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    runner.drafter.draft = watch  # type: ignore[method-assign]
    try:
        ask_all(core, [Asked(repeated(4, runner.model.vocab_size, 12), params)])
    finally:
        runner.drafter.draft = draft  # type: ignore[method-assign]
    alone = make_core(folders("llama-linear"), max_num_seqs=NUM_SEQS)
    told = ask_all(alone, [Asked(known, params) for known, _ in found])
    assert len(found) > 5
    assert [each.token_ids[: len(drafts)] for each, (_, drafts) in zip(told, found, strict=True)] == [
        drafts for _, drafts in found
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_model_that_drafts_for_itself_is_always_right(runners: Runners, temperature: float) -> None:
    """Sampled tokens too: both choose with the same random numbers."""
    folder, runner, settings = runners("llama", "llama")
    params = SamplingParams(max_tokens=37, temperature=temperature, seed=8, ignore_eos=True)
    core = make_core(folder, runner, **settings)
    [told] = ask_all(core, [Asked(repeated(3, runner.model.vocab_size, 20), params)])
    assert len(told.token_ids) == 37
    assert num_accepted([told]) == 30
    assert core.num_steps == 1 + 6, "a first token, and six of six steps"


def test_keys_that_were_computed_are_found_in_the_prefix_cache(runners: Runners) -> None:
    """The draft model reads a prompt once, whoever asks, and again what it lost."""
    folder, runner, settings = runners("llama", "llama")
    assert isinstance(runner.drafter, DraftModel)
    read: list[int] = []
    draft = runner.drafter.draft

    def watch(steps: Any) -> Any:
        read.append(steps[0].num_tokens)
        return draft(steps)

    core = make_core(folder, runner, **settings)
    prompt = repeated(5, runner.model.vocab_size, 41)
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    runner.drafter.draft = watch  # type: ignore[method-assign]
    try:
        [first] = ask_all(core, [Asked(prompt, params)])
        [again] = ask_all(core, [Asked(prompt, params)])
        core.drop_kv_cache()
        [later] = ask_all(core, [Asked(prompt, params)])
    finally:
        runner.drafter.draft = draft  # type: ignore[method-assign]
    assert first.token_ids == again.token_ids == later.token_ids
    assert read == [43, 2, 3, 2, 43, 2], "five blocks of eight were there the second time"


def test_texts_beyond_its_context_are_not_drafted(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("llama")
    shutil.copytree(folder, tmp_path / "short")
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**values, "max_position_embeddings": 40}))
    asked = [Asked(repeated(2, values["vocab_size"], 30), SamplingParams(max_tokens=25, temperature=0.0))]
    [expected] = ask_all(make_core(folder), asked)
    core = make_core(folder, **{**DRAFTING, "speculative_model": str(tmp_path / "short")})
    [told] = ask_all(core, asked)
    assert told.token_ids == expected.token_ids
    assert 8 <= num_accepted([told]) <= 10


def test_padded_steps_draft_the_same(runners: Runners) -> None:
    """As CUDA graphs do; a recording on the CPU is a forward that is computed again at each launch."""
    folder, runner, settings = runners("llama", "llama")
    drafter = runner.drafter
    assert isinstance(drafter, DraftModel)
    asked = varied_requests(runner.model.vocab_size, 24)
    expected = ask_all(make_core(folder, runner, **settings), asked)
    recorder = Recorder()

    def forward(inputs: StepInputs) -> Tensor:
        recorder.forwarded = drafter._forward, inputs
        return drafter.buffers.logits[: inputs.shape.num_sampled]

    drafter._graphs.capture(recorder, drafter._inputs, forward)
    find, num_tokens = drafter._graphs.find, list[tuple[int, int]]()

    def watch(batch: StepBatch) -> Any:
        found = find(batch)
        num_tokens.append((batch.num_tokens, found.inputs.shape.num_tokens if found is not None else 0))
        return found

    drafter._graphs.find = watch  # type: ignore[method-assign]
    try:
        told = ask_all(make_core(folder, runner, **settings), asked)
    finally:
        drafter._graphs._steps.clear()
        del drafter._graphs.find
    assert all(tokens <= padded for tokens, padded in num_tokens)
    assert any(tokens < padded for tokens, padded in num_tokens)
    assert_same(told, expected)
    assert num_accepted(told) == num_accepted(expected)


def test_it_has_a_part_of_the_memory_and_says_so(folders: Callable[[str], Path]) -> None:
    limits: dict[str, Any] = {"cpu_kv_cache_gib": 0.001, "max_num_seqs": 64, "device": "cpu"}
    settings: dict[str, Any] = {**DRAFTING, "speculation": "auto", "speculative_model": str(folders("llama"))}
    plain = load_engine(EngineConfig(model=str(folders("llama")), **limits), lambda *_: None)
    engine = load_engine(EngineConfig(model=str(folders("llama")), **{**settings, **limits}), lambda *_: None)
    assert engine.info.num_kv_blocks == plain.info.num_kv_blocks // 2, "its blocks are as large"
    assert engine.info.draft is not None
    assert engine.info.draft.kv_cache_bytes == engine.info.kv_cache_bytes
    assert engine.info.draft.weight_bytes == engine.info.weight_bytes == plain.info.weight_bytes
    assert (engine.info.draft.architecture, engine.info.draft.num_tokens) == ("LlamaForCausalLM", 5)
    assert isinstance(engine.core, EngineCore)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    [told] = ask_all(engine.core, [Asked([3, 4, 5], params)])
    assert len(told.token_ids) == 20
    text = engine.render_metrics().decode()
    assert 'tessera:spec_decode_num_drafts_total{method="draft_model",' in text


def test_wrong_draft_models_are_refused_before_weights_are_read(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folders("llama")
    values = json.loads((folder / "config.json").read_text())
    vocabulary = {f"t{number}": number for number in range(values["vocab_size"])}

    def variant(name: str, tokens: dict[str, int] | None = None, **changed: Any) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**values, **changed}))
        if tokens is not None:
            model = {"type": "WordLevel", "vocab": tokens, "unk_token": "t0"}
            (tmp_path / name / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
        return tmp_path / name

    def refusal(draft: Path, served: Path = folder) -> str:
        config = EngineConfig(model=str(served), **{**DRAFTING, "speculative_model": str(draft)})
        with pytest.raises(ConfigError) as caught:
            make_drafter(config, load_config(served), make_ops(CPU))
        return str(caught.value).replace(str(tmp_path), "")

    assert refusal(tmp_path / "nowhere") == (
        "the draft model cannot be used: /nowhere is not a folder; give a model folder with config.json and "
        "*.safetensors"
    )
    assert refusal(variant("small", vocab_size=50)) == (
        f"the draft model /small has a vocabulary of 50 tokens, and the served model one of {values['vocab_size']}: "
        "they must be the same"
    )
    assert "parameters, more than the served model with" in refusal(variant("large", num_hidden_layers=9))
    named, other = variant("named", vocabulary), variant("other", {**vocabulary, "t3": 4, "t4": 3})
    assert refusal(other, named) == (
        "the draft model /other has another vocabulary than the served model: 't4' is its token 3, and token 4 of the "
        "served model"
    )
