"""Requests whose every bit is compared, alone and in company: what `--batch-invariant` promises."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest, TokenLogprobs
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.drafters.make import make_drafter
from tessera.engine.models.config import load_config
from tessera.engine.ops.interface import Ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CpuDevice

CLIENT = b"canaries"
MOST_STEPS = 20_000

# Sizes of a layer as in the models that they are called after, and few layers.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
    },
    "window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 2048,
        "sliding_window": 200,
    },
    "small": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 192,
        "sliding_window": 24,
        "num_hidden_layers": 2,
        "vocab_size": 200,
    },
}
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Canary:
    prompt: tuple[int, ...]
    params: SamplingParams


Canaries = dict[str, Canary]
Answers = dict[str, bytes]  # of each canary: tokens, and log-probabilities with their alternatives


def write_config(folder: Path, name: str) -> Path:
    """A folder of the model for dummy weights; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**COMMON, **MODELS[name]}))
    return folder


def make_core(folder: Path, ops: Ops, **settings: Any) -> EngineCore:
    """An engine with dummy weights, of which each start has the same."""
    defaults: dict[str, Any] = {"dtype": "bfloat16", "load_format": "dummy", "seed": 5, "batch_invariant": True}
    asked = EngineConfig(model=str(folder), **{**defaults, **settings})
    model = load_config(folder)
    kind = "cpu" if isinstance(ops.device, CpuDevice) else "cuda"
    drafter = make_drafter(asked.with_device_defaults(kind), model, ops)
    runner = ModelRunner(asked, model, ops.device, ops, drafter=drafter)
    return EngineCore(
        runner.config,
        runner,
        vocab_size=model.vocab_size,
        max_model_len=runner.max_model_len,
        num_kv_blocks=runner.num_kv_blocks,
        eos_token_ids=[],
        short_rope_len=runner.short_rope_len,
        draft_limits=None if drafter is None else drafter.limits,
    )


def make_canaries(seed: int, count: int, longest: int, max_tokens: int, vocab_size: int) -> Canaries:
    """Prompts of 1 to `longest` tokens, every second one with the beginning of another; most of them greedy."""
    rng = np.random.default_rng(seed)
    beginning = rng.integers(3, vocab_size, longest).tolist()
    lengths = np.unique(np.geomspace(1, longest, max(count // 2, 2)).astype(int))
    found: Canaries = {}
    for index in range(count):
        length = int(lengths[index % len(lengths)])
        own = rng.integers(3, vocab_size, length).tolist()
        shared = length // 2 if index % 2 else 0
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if index % 4 == 3 else 0.0,
            seed=index,
            ignore_eos=True,
            logprobs=2,
        )
        found[f"canary{index}"] = Canary((*beginning[:shared], *own[shared:]), params)
    return found


def ask(core: EngineCore, canaries: Canaries, *, others: Canaries | None = None, aborts: bool = False) -> Answers:
    """The answers of canaries that come at once; with `others` among them, a few in each step, each of which is
    aborted some steps later if `aborts`."""
    tokens: dict[str, list[int]] = {name: [] for name in canaries}
    logprobs: dict[str, list[TokenLogprobs]] = {name: [] for name in canaries}
    coming = list((others or {}).items())
    waiting = list(canaries.items())
    started: list[str] = []
    for step in range(MOST_STEPS):
        for queue, count in ((coming, 3), (waiting, 2 if others else len(waiting))):
            for name, canary in queue[:count]:
                core.add_request(AddRequest(name, array("i", canary.prompt), canary.params, float(step)), CLIENT)
            if queue is coming:
                started += [name for name, _ in queue[:count]]
            del queue[:count]
        if aborts and len(started) > 12:
            core.abort(started[:2], CLIENT)
            del started[:2]
        if not core.has_work and not coming and not waiting:
            break
        for output in core.step().get(CLIENT, []):
            assert output.error is None, output.error
            if output.request_id in tokens:
                tokens[output.request_id] += output.token_ids
                logprobs[output.request_id] += output.logprobs or []
    assert not core.has_work, "still not done"
    for name, canary in canaries.items():
        assert len(tokens[name]) == canary.params.max_tokens
    return {name: _bits(tokens[name], logprobs[name]) for name in canaries}


def ask_each_alone(core: EngineCore, canaries: Canaries) -> Answers:
    answers: Answers = {}
    for name, canary in canaries.items():
        answers |= ask(core, {name: canary})
    return answers


def _bits(tokens: list[int], logprobs: list[TokenLogprobs]) -> bytes:
    ids = [id for each in logprobs for id in (each.token_id, each.rank, *each.top_token_ids)]
    values = [value for each in logprobs for value in (each.logprob, *each.top_logprobs)]
    return np.array([*tokens, *ids], np.int32).tobytes() + np.array(values, np.float32).tobytes()


def differing(answers: Answers, expected: Answers) -> list[str]:
    """Names of the canaries whose answers are not the expected ones, bit for bit."""
    return [name for name in expected if answers[name] != expected[name]]


def companies(
    core: EngineCore, canaries: Canaries, *, longest: int, vocab_size: int, num_others: int
) -> Iterator[tuple[str, Answers]]:
    """The canaries' answers in companies of several kinds, each after the prefix cache was emptied but one."""
    others: Canaries = {}
    for index, canary in enumerate(make_canaries(77, num_others, longest, 8, vocab_size).values()):
        scored = 1 if index % 4 == 0 else None  # makes a step compute all tokens to the end
        params = msgspec.structs.replace(canary.params, prompt_logprobs=scored)
        others[f"other{index}"] = Canary(canary.prompt, params)
    core.reset_prefix_cache()
    yield "together", ask(core, canaries)
    yield "from the prefix cache", ask(core, canaries)
    core.reset_prefix_cache()
    yield "in a load", ask(core, canaries, others=others)
    core.reset_prefix_cache()
    yield "in an abort storm", ask(core, canaries, others=others, aborts=True)
