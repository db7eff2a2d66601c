"""Drafts on a CUDA device: what a request gets with them is what it gets without, bit for bit in one order of sums.

The model called "small" also runs on the CPU, by the kernels' own sources: see docs/kernels/testing.md.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU
from tests.support.cases.canaries import MODELS, make_core, write_config
from tests.support.speculation import Asked, Told, ask_all, num_accepted, num_drafted, predicted

pytestmark = pytest.mark.gpu

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0.5, "seed": 4, "presence_penalty": 0.4, "logit_bias": {9: 1.5}, "min_p": 0.02},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(3, 90)), "bad_words": ((5, 6),)},
]
SMALL = {"max_model_len": 128, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
LARGE = {"max_model_len": 2048, "num_kv_blocks": 2000, "max_num_seqs": 64, "max_num_batched_tokens": 1024}


def requests(model: str, vocab_size: int) -> list[Asked]:
    rng = random.Random(7)
    sizes = ((9, 14), (25, 12), (16, 13)) if model == "small" else ((40, 60), (700, 40), (129, 50), (128, 60))
    found = []
    for number in range(len(SETTINGS) * (1 if model == "small" else 4)):
        length, max_tokens = sizes[number % len(sizes)]
        prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **SETTINGS[number % len(SETTINGS)])
        found.append(Asked(prompt, params))
    return found


def make(folder: Path, ops: Ops, model: str, **settings: Any) -> Any:
    return make_core(folder, ops, **{**(SMALL if model == "small" else LARGE), **settings})


def everything(told: list[Told]) -> list[Any]:
    return [
        (each.token_ids, [(one.logprob, one.rank, one.top_token_ids, one.top_logprobs) for one in each.logprobs])
        for each in told
    ]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", ["small", "qwen3-0.6b", "llama-8b", "window"])
def test_in_one_order_of_sums_drafts_change_no_bit(
    model: str, eager: bool, cuda_device: CudaDevice, tmp_path: Path
) -> None:
    ops = CudaOps(cuda_device, batch_invariant=True)
    folder = write_config(tmp_path, model)
    asked = requests(model, MODELS[model].get("vocab_size", 2048))
    core = make(folder, ops, model, enforce_eager=eager)
    expected = ask_all(core, asked)
    del core
    for method in ("ngram", "suffix"):
        core = make(folder, ops, model, enforce_eager=eager, speculation="on", speculative_method=method)
        told = ask_all(core, predicted(asked, expected))
        del core
        assert everything(told) == everything(expected), method
        assert num_accepted(told) > len(asked) * 3


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(("model", "draft"), [("small", "small"), ("llama-8b", "qwen3-0.6b")])
def test_in_one_order_of_sums_a_draft_model_changes_no_bit(
    model: str, draft: str, eager: bool, cuda_device: CudaDevice, tmp_path: Path
) -> None:
    ops = CudaOps(cuda_device, batch_invariant=True)
    folder, draft_folder = write_config(tmp_path / "served", model), write_config(tmp_path / "draft", draft)
    asked = requests(model, MODELS[model].get("vocab_size", 2048))
    expected = ask_all(make(folder, ops, model, enforce_eager=eager), asked)
    settings = {"speculative_method": "draft_model", "speculative_model": str(draft_folder)}
    core = make(folder, ops, model, enforce_eager=eager, speculation="on", **settings)
    told = ask_all(core, asked)
    assert everything(told) == everything(expected)
    assert num_drafted(told) > len(asked) * 3
    if draft == model:
        assert num_accepted(told) > num_drafted(told) / 3, "it says what the model says, but for penalties and masks"


def write_head(folder: Path, served: Path) -> dict[str, Any]:
    """config.json of an EAGLE-3 head for dummy weights; -> the settings that ask for it."""
    values = json.loads((served / "config.json").read_text())
    head = {**values, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 128}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head))
    return {"speculation": "on", "speculative_method": "eagle3", "speculative_model": str(folder)}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", ["small", "llama-8b"])
def test_in_one_order_of_sums_an_eagle3_head_changes_no_bit(
    model: str, eager: bool, cuda_device: CudaDevice, tmp_path: Path
) -> None:
    ops = CudaOps(cuda_device, batch_invariant=True)
    folder = write_config(tmp_path / "served", model)
    drafting = write_head(tmp_path / "head", folder)
    asked = requests(model, MODELS[model].get("vocab_size", 2048))
    expected = ask_all(make(folder, ops, model, enforce_eager=eager), asked)
    told = ask_all(make(folder, ops, model, enforce_eager=eager, **drafting), asked)
    assert everything(told) == everything(expected)
    assert num_drafted(told) > len(asked) * 3


def test_small_eagle3_head_drafts_as_on_the_cpu(cuda_device: CudaDevice, tmp_path: Path) -> None:
    """In float32, whose sums differ by little."""
    folder = write_config(tmp_path / "served", "small")
    settings = {**write_head(tmp_path / "head", folder), "dtype": "float32", "batch_invariant": False}
    asked = requests("small", 200)[:1]
    found = []
    for ops in (make_ops(CPU), CudaOps(cuda_device)):
        core = make(folder, ops, "small", **settings)
        drafts = list[list[int]]()
        learn = core._learn_drafts

        def watch(step: Any, running: Any, learn: Any = learn, drafts: Any = drafts) -> None:
            learn(step, running)
            drafts += [list(each.tokens) for each in step.verified]

        core._learn_drafts = watch
        [told] = ask_all(core, asked)
        found.append((told.token_ids, drafts))
    assert found[0][1]
    assert found[0] == found[1]


@pytest.mark.parametrize("model", ["small", "qwen3-0.6b"])
def test_in_float32_drafts_change_no_token(model: str, cuda_device: CudaDevice, tmp_path: Path) -> None:
    ops = CudaOps(cuda_device)
    folder = write_config(tmp_path, model)
    asked = requests(model, MODELS[model].get("vocab_size", 2048))
    settings = {"dtype": "float32", "batch_invariant": False}
    core = make(folder, ops, model, **settings)
    expected = ask_all(core, asked)
    del core
    core = make(folder, ops, model, **settings, speculation="on")
    told = ask_all(core, predicted(asked, expected))
    assert [each.token_ids for each in told] == [each.token_ids for each in expected]
    assert num_accepted(told) > len(asked) * 3
