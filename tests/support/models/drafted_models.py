"""Models with a drafter of every method, which is right as often as a test wants: random, and trained."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tessera.engine.contract.speculation.settings import MODEL_METHODS
from tessera.engine.core.core import EngineCore
from tessera.engine.drafters.draft_model import DraftModel
from tessera.engine.grammar.compiler import GrammarCompiler
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.safetensors import Checkpoint
from tessera.engine.runner.model_runner import ModelRunner
from tests.support.models.tiny_eagle3 import write_head
from tests.support.models.tiny_models import write_safetensors
from tests.support.models.tiny_predictor import EXTRA, write_model
from tests.support.models.tiny_tensors import Random
from tests.support.paths import BUILTIN
from tests.support.speculation import make_core, make_runner

MAX_SEQS = 6
LOOK_UP_METHODS = ("ngram", "suffix", "prediction")
METHODS = (*LOOK_UP_METHODS, *MODEL_METHODS)
DRAFT_TOKENS = 7
LAYERS_OF_DRAFT_MODEL = 2


class DraftedModel:
    """A model whose folder has a layer of multi-token prediction, a smaller one of its kind, and a head of EAGLE-3."""

    def __init__(self, folder: Path, draft_model: Path, head: Path, compiler: GrammarCompiler | None = None) -> None:
        self.folder = folder
        self.compiler = compiler
        model = load_config(folder)
        self.vocab_size, self.eos_token_ids = model.vocab_size, model.eos_token_ids
        write_head(head, model.hidden_size, model.vocab_size, model.vocab_size // 2)
        self._folders = {"draft_model": str(draft_model), "eagle3": str(head)}
        self._runners: dict[str, ModelRunner] = {}

    def close(self) -> None:
        if self.compiler is not None:
            self.compiler.close()

    def plain_core(self) -> EngineCore:
        return make_core(self.folder, self._runner("off"), grammars=self.compiler)

    def core(
        self, method: str, texts: list[list[int]], rate: float, *, ahead: bool = False, **changed: Any
    ) -> EngineCore:
        """With `texts`, those of the requests by their numbers, of which a model that drafts knows `rate` of the
        tokens."""
        core = make_core(
            self.folder,
            self._runner(method),
            grammars=self.compiler,
            ahead=ahead,
            **{**self.settings(method), **changed},
        )
        if method in MODEL_METHODS:
            tell_texts(core, self._runner(method), texts, rate)
        return core

    def settings(self, method: str) -> dict[str, Any]:
        found: dict[str, Any] = {"max_num_seqs": MAX_SEQS, "num_speculative_tokens": DRAFT_TOKENS}
        if method in MODEL_METHODS:
            found |= {"speculative_method": method, "speculative_model": self._folders.get(method)}
        else:
            found |= {"speculative_method": "suffix" if method == "suffix" else "ngram", "prompt_lookup_min": 1}
        return {**found, "speculation": "on"}

    def _runner(self, method: str) -> ModelRunner:
        key = method if method in MODEL_METHODS else "look-up"
        if key not in self._runners:
            settings = self.settings(method)
            self._runners[key] = make_runner(self.folder, **settings)
        return self._runners[key]


def random_model(root: Path) -> DraftedModel:
    write_model(root / "served", "mimo")
    return DraftedModel(root / "served", root / "served", root / "head")


def trained_model(root: Path) -> DraftedModel:
    """The demonstration model, its first layers as a draft model, and a random layer of multi-token prediction."""
    config = json.loads((BUILTIN / "config.json").read_text())
    width, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    assert config["head_dim"] * heads == width
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    checkpoint = Checkpoint(BUILTIN)
    tensors = {name: checkpoint.tensor(name) for name in sorted(checkpoint.names)}
    rng, at, last = Random(1), "model.mtp_layers.0.", f"model.layers.{layers - 1}."
    own = {name.replace(last, at): tensor for name, tensor in tensors.items() if name.startswith(last)}
    token_norm, state_norm, join = EXTRA["mimo"]
    for norm in (token_norm, state_norm, "final_layernorm"):
        own[f"{at}{norm}.weight"] = rng.norm(width)
    own[f"{at}{join}.weight"] = rng.normal(width, 2 * width, std=0.1)
    draft = {**config, **mimo, "num_nextn_predict_layers": 0, "num_hidden_layers": LAYERS_OF_DRAFT_MODEL}
    kept = tuple(f"model.layers.{layer}." for layer in range(LAYERS_OF_DRAFT_MODEL))
    first = {name: each for name, each in tensors.items() if name.startswith(kept) or ".layers." not in name}
    for name, values, found in (("served", {**config, **mimo}, {**tensors, **own}), ("draft", draft, first)):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(values))
        write_safetensors(root / name / "model.safetensors", found, "BF16")
        for each in ("tokenizer.json", "tokenizer_config.json"):
            (root / name / each).symlink_to(BUILTIN / each)
    compiler = GrammarCompiler(root / "served", config["vocab_size"], [config["eos_token_id"]])
    return DraftedModel(root / "served", root / "draft", root / "head", compiler)


def tell_texts(core: EngineCore, runner: ModelRunner, texts: list[list[int]], rate: float, seed: int = 5) -> None:
    """Have the drafter say what comes, in `rate` of the tokens; else it says what it does."""
    drafter, rng = runner.drafter, random.Random(seed)
    assert isinstance(drafter, DraftModel)
    choose = type(drafter)._choose
    drafter.__dict__.pop("_choose", None)  # of another core
    if not texts:
        return

    def choose_rightly(running: Any) -> Any:
        chosen = choose(drafter, running)
        sampling = running.batch.sampling
        numbers = {each.slot: int(each.request_id) for each in core.scheduler.running}
        for row, (slot, position) in enumerate(zip(sampling.slots.tolist(), sampling.positions.tolist(), strict=True)):
            text = texts[numbers[slot] % len(texts)]
            if position < len(text) and rng.random() < rate:
                chosen.numpy()[row] = text[position]
        return chosen

    drafter._choose = choose_rightly  # type: ignore[method-assign]
