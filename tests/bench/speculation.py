"""Speculative decoding: tokens a second with and without drafts, the engine alone in this process.

    python -m tests.bench.speculation held --model llama-8b --streams 1 16 64 256
    python -m tests.bench.speculation texts [--folder MODEL]

`held` has random weights, and holds acceptance at --acceptance for each draft token, whatever is sampled: look-up runs,
its drafts are replaced, and of each as many tokens count as that comes to. With --method draft_model a model of
Qwen3-0.6B's shape computes drafts, with eagle3 a head, with mtp a further layer. The time of a step with a draft
against one without is there too. `texts` is a real model (the built-in one) that copies, reverses a list and fills
JSON, with real acceptance. Each line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import tokenizers

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest, TokenIds
from tessera.engine.contract.sampling_params import Grammar, SamplingParams
from tessera.engine.contract.speculation.settings import MODEL_METHODS, SpeculationMethod
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tessera.engine.speculation.drafting import Drafting
from tessera.engine.speculation.speculator import Speculator
from tessera.engine.speculation.verification import VerifiedDraft
from tests.bench.models import CONFIGS, QWEN3_06B, write_model
from tests.support.paths import BUILTIN

CLIENT = b"bench"
GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0  # multiples of it, less their whole parts, are spread evenly
MODES = ("off", "on", "auto")
LISTED = "anchor basket candle dragon engine forest garden hammer island jacket kettle ladder magnet needle"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


class HeldDrafting(Drafting):
    """Looks for what it would draft, and drafts as many tokens as there may be; its acceptance is known."""

    rate = 0.0
    is_computed = False  # by a model, whose tokens need not be replaced

    @property
    def acceptance_rate(self) -> float:
        return self.rate

    def propose(self, token_ids: TokenIds, most: int, constraint: Any) -> list[int]:
        super().propose(token_ids, most, constraint)
        if self.is_computed:
            return []
        return [3 + (len(token_ids) + number) % 100 for number in range(most)]


class Held:
    """Patches under which acceptance is `rate`.

    As many tokens of a draft count as with a chance of `rate` for each, but evenly: the chances are numbers that fill
    0 to 1 without clusters, so some dozen steps come to the tokens that are expected of them, and two runs to the same.
    """

    def __init__(self, rate: float, seed: int) -> None:
        place = random.Random(seed).random()

        def count_accepted(draft: VerifiedDraft, sampled: Sequence[int]) -> int:
            nonlocal place
            place = (place + GOLDEN_RATIO) % 1.0
            if rate <= 0.0 or rate >= 1.0:
                return len(draft.tokens) if rate > 0.0 else 0
            return min(len(draft.tokens), int(math.log(1.0 - place) / math.log(rate)))

        def make_drafting(speculator: Speculator, *given: Any) -> Drafting:
            drafting = make(speculator, *given)
            drafting.__class__ = HeldDrafting
            return drafting

        make = Speculator.make_drafting
        HeldDrafting.rate = rate
        self._patches: list[Any] = [
            mock.patch.object(VerifiedDraft, "count_accepted", count_accepted),
            mock.patch.object(Speculator, "make_drafting", make_drafting),
        ]

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def decode(core: EngineCore, requests: list[tuple[list[int], SamplingParams]]) -> dict[str, float]:
    """All at once; timed from the step after which each has its first token."""
    for number, (prompt, params) in enumerate(requests):
        core.add_request(AddRequest(str(number), array("i", prompt), params, time.monotonic()), CLIENT)
    counts: dict[str, int] = {}
    begun = begun_cpu = begin_tokens = begin_steps = 0.0
    while core.has_work:
        for output in core.step().get(CLIENT, []):
            assert output.error is None, output.error
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
        if not begun and len(counts) == len(requests):
            begun, begun_cpu = time.perf_counter(), time.process_time()
            begin_tokens, begin_steps = sum(counts.values()), core.num_steps
    seconds, num_steps = time.perf_counter() - begun, core.num_steps - begin_steps
    cpu_seconds = time.process_time() - begun_cpu
    num_tokens = sum(counts.values()) - begin_tokens
    return {
        "tok/s": round(num_tokens / seconds, 1),
        "tok/s of CPU": round(num_tokens / cpu_seconds, 1),
        "tokens a step": round(num_tokens / max(num_steps, 1) / len(requests), 2),
        "ms a step": round(1000 * seconds / max(num_steps, 1), 3),
    }


def start(folder: Path, given: argparse.Namespace, mode: str, most: int, **settings: Any) -> EngineCore:
    drafts = {"speculative_method": given.method, "num_speculative_tokens": given.draft_tokens}
    if mode != "off":
        settings = {**settings, **drafts, "speculative_model": given.draft_model}
    config = EngineConfig(
        model=str(folder),
        device=given.device,
        max_num_seqs=most,
        max_num_batched_tokens=max(2048, 8 * most),
        batch_invariant=given.batch_invariant,
        speculation=mode,  # type: ignore[arg-type]
        **settings,
    )
    core = load_engine(config, lambda stage, done, total: None).core
    assert isinstance(core, EngineCore)
    return core


def write_head(root: Path, served: dict[str, Any]) -> Path:
    """config.json of an EAGLE-3 head with 32,000 tokens, for dummy weights."""
    head = {**served, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32_000}
    (root / "head").mkdir()
    (root / "head" / "config.json").write_text(json.dumps(head))
    return root / "head"


def measure_held(given: argparse.Namespace) -> None:
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as root, Held(given.acceptance, given.seed):
        if given.method == "mtp":  # the same layers, and one that predicts
            served = {**CONFIGS[given.model], "architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
            folder = write_model(Path(root), given.model, {**served, "num_nextn_predict_layers": 1})
        else:
            folder = write_model(Path(root), given.model)
        if given.method == "draft_model":
            shape = {**QWEN3_06B, "vocab_size": CONFIGS[given.model]["vocab_size"]}
            given.draft_model = given.draft_model or str(write_model(Path(root), "draft", shape))
        if given.method == "eagle3":
            given.draft_model = given.draft_model or str(write_head(Path(root), CONFIGS[given.model]))
        HeldDrafting.is_computed = given.method in MODEL_METHODS
        for mode in MODES:
            length = given.input_tokens + given.output_tokens
            core = start(folder, given, mode, max(given.streams), load_format="dummy", seed=1, max_model_len=length)
            for streams in (1, *given.streams):  # the first warms up
                params = SamplingParams(max_tokens=given.output_tokens, temperature=0.0, ignore_eos=True)
                prompts = [[rng.randrange(3, 200) for _ in range(given.input_tokens)] for _ in range(streams)]
                found = decode(core, [(prompt, params) for prompt in prompts])
                print(json.dumps({"model": given.model, "speculation": mode, "streams": streams, **found}), flush=True)
            del core
            gc.collect()


def texts() -> dict[str, tuple[str, Grammar | None]]:
    return {
        "copying": (f"Copy this list: {', '.join(LISTED.split()[:6])}", None),
        "a list": (f"Reverse this list: {', '.join(LISTED.split()[:8])}", None),
        "JSON": (
            "Fill in the JSON: Ada Lovelace is 36 years old and lives in London.",
            Grammar("json_schema", json.dumps(PERSON)),
        ),
    }


def measure_texts(given: argparse.Namespace) -> None:
    folder = Path(given.folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for mode in MODES:
        core = start(folder, given, mode, 16)
        for name, (text, grammar) in texts().items():
            prompt = tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids
            params = SamplingParams(max_tokens=given.output_tokens, temperature=0.0, grammar=grammar)
            for streams in given.streams:
                before = core.stats().totals
                found = decode(core, [(prompt, params)] * streams)
                after = core.stats().totals
                assert before is not None
                assert after is not None
                drafted = after.num_draft_tokens - before.num_draft_tokens
                accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
                row = {"text": name, "speculation": mode, "streams": streams, **found}
                print(json.dumps({**row, "drafted": drafted, "accepted": accepted}), flush=True)
                core.reset_prefix_cache()
        del core
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speculation", description=__doc__)
    parser.add_argument("what", choices=("held", "texts"))
    parser.add_argument("--model", choices=tuple(CONFIGS), default="llama-8b")
    parser.add_argument("--folder", default=str(BUILTIN))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--method", choices=get_args(SpeculationMethod), default="suffix")
    parser.add_argument("--draft-model", help="folder; with held another than one of Qwen3-0.6B's shape")
    parser.add_argument("--draft-tokens", type=int, help="7, of a model 5")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of each draft token")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    measure_held(given) if given.what == "held" else measure_texts(given)


if __name__ == "__main__":
    main()
