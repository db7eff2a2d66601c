"""A conversation about a file of code (code_editing.json): what look-up is worth there, and what a model makes of it.

    python -m tests.bench.conversation --tokenizer TOKENIZER.json
    python -m tests.bench.conversation --folder MODEL --device cpu --method suffix

With a tokenizer alone each recorded answer counts as what the model says: the tokens a step that look-up would leave if
it drafted in every step. With a model its own answers to the same prompts are timed, cut to its context from the front
and greedy, with drafts and without in turn; of three rounds the fastest counts. Each line is JSON.
"""

from __future__ import annotations

import argparse
import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import tokenizers

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import TokenIds
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.contract.speculation.settings import Speculation, SpeculationMethod
from tessera.engine.core.core import EngineCore
from tessera.engine.grammar.constraint import TokenConstraint
from tessera.engine.grammar.token_tables import Words
from tessera.engine.ipc.load import load_engine
from tessera.engine.speculation.drafting import Drafting
from tessera.engine.speculation.speculator import Speculator
from tests.bench.speculation import decode

RECORDED = Path(__file__).with_name("code_editing.json")
LOOK_UPS: tuple[SpeculationMethod, ...] = ("ngram", "suffix")
ROUNDS = 3


@dataclass
class RecordedSequence:
    """See `DraftedSequence`."""

    token_ids: TokenIds
    max_num_tokens: int
    drafting: Drafting | None
    draft: list[int] = field(default_factory=list)
    draft_source: str = ""
    draft_masks: list[Words] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    constraint: TokenConstraint | None = None
    num_pending_tokens: int = 0
    num_drafter_tokens: int = 0
    num_drafter_chunk: int = 0
    can_draft: bool = True


def turns(tokenizer: tokenizers.Tokenizer) -> list[tuple[list[int], list[int]]]:
    """The tokens of each prompt, with all turns before it, and of its answer."""
    found, text = [], ""
    for turn in json.loads(RECORDED.read_text()):
        text += f"User: {turn['user']}Assistant:\n"
        found.append((tokenizer.encode(text).ids, tokenizer.encode(turn["assistant"]).ids))
        text += turn["assistant"]
    return found


def look_up_recorded(tokenizer: tokenizers.Tokenizer, method: SpeculationMethod, num_tokens: int) -> dict[str, Any]:
    """Drafts in every step, verified against the recorded answers."""
    speculator = Speculator(Speculation(method=method, num_tokens=num_tokens, always=True), max_tokens=num_tokens)
    num_said = num_steps = num_drafted = num_accepted = 0
    for prompt, answer in turns(tokenizer):
        text, end = array("i", prompt), len(prompt) + len(answer)
        sequence = RecordedSequence(text, end, speculator.make_drafting(b"", len(prompt), None))
        while len(text) < end:
            left = answer[len(text) - len(prompt) :]
            speculator.draft([sequence], None)
            speculator.catch_up()
            draft = sequence.draft
            count = next((place for place, token in enumerate(draft) if token != left[place]), len(draft))
            text.extend(left[: count + 1])
            num_steps, num_drafted, num_accepted = num_steps + 1, num_drafted + len(draft), num_accepted + count
        num_said += len(answer)
        speculator.keep_completion(b"", array("i", answer), 1)
    tokens = round(num_said / num_steps, 2)
    return {"method": method, "tokens a step": tokens, "drafted": num_drafted, "accepted": num_accepted}


def ask_model(given: argparse.Namespace) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(given.folder) / "tokenizer.json"))
    cores: dict[str, EngineCore] = {}
    for mode in ("off", "on", "auto"):
        drafts: dict[str, Any] = {"speculative_method": given.method, "speculative_model": given.draft_model}
        config = EngineConfig(
            model=given.folder,
            device=given.device,
            speculation=mode,
            prefix_caching=False,
            **(drafts if mode != "off" else {}),
        )
        engine = load_engine(config, lambda stage, done, total: None)
        assert isinstance(engine.core, EngineCore)
        cores[mode], context = engine.core, engine.info.max_model_len
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for _ in range(ROUNDS):
        for mode, core in cores.items():
            core.reset_prefix_cache()  # and with it the completions of the round before
            for number, (prompt, answer) in enumerate(turns(tokenizer)):
                count = min(len(answer), context // 2)
                kept = prompt[-(context - count) :]
                params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
                before = core.stats().totals
                row = {"prompt": len(kept), "said": count, **decode(core, [(kept, params)])}
                after = core.stats().totals
                assert before is not None
                assert after is not None
                row["drafted"] = after.num_draft_tokens - before.num_draft_tokens
                row["accepted"] = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
                best = found.get((number, mode))
                if best is None or row["tok/s"] > best["tok/s"]:
                    found[number, mode] = row
    for (number, mode), row in sorted(found.items()):
        print(json.dumps({"turn": number, "speculation": mode, **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.conversation", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tokenizer", help="tokenizer.json")
    what.add_argument("--folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--method", choices=get_args(SpeculationMethod), default="suffix")
    parser.add_argument("--draft-model")
    parser.add_argument("--draft-tokens", type=int, default=7)
    given = parser.parse_args()
    if given.folder is not None:
        ask_model(given)
        return
    tokenizer = tokenizers.Tokenizer.from_file(given.tokenizer)
    for method in LOOK_UPS:
        print(json.dumps(look_up_recorded(tokenizer, method, given.draft_tokens)))


if __name__ == "__main__":
    main()
