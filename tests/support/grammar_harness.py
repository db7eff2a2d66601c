"""An engine core over the built-in model's tokenizer, whose "model" is noise: harsher on grammars than any model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import tokenizers

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest, FinishReason, Sibling
from tessera.engine.contract.sampling_params import Grammar, SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.core.step_batch import StepBatch, StepResult, TokenMask
from tessera.engine.grammar.compiler import GrammarCompiler
from tessera.engine.grammar.token_tables import Words
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.tensor import CPU, from_numpy
from tests.support.cases.token_ids import token_ids
from tests.support.fakes.fake_runner import fake_limits
from tests.support.paths import BUILTIN

Array: TypeAlias = np.ndarray[Any, Any]

MODEL = BUILTIN
VOCAB_SIZE = 2560
EOS = 2
CLIENT = b"client"
NUM_SLOTS = 64
MAX_DRAFT = 8
TOKENIZER = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def schema(definition: Any, **fields: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(definition), **fields)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def decode(token_ids: list[int]) -> str:
    text: str = TOKENIZER.decode(token_ids)
    return text


@dataclass
class NoisyStep:
    batch: StepBatch
    drafted: Array
    outcome: StepResult | None = None

    def result(self) -> StepResult:
        assert self.outcome is not None, "a constrained step is sampled before its result is taken"
        return self.outcome

    def drafts(self) -> Array:
        assert self.batch.drafting, "nothing was drafted before this step"
        return self.drafted


class NoiseRunner:
    """Chooses at random among the tokens that the mask leaves; a row depends on its own newest token alone.

    Its draft model knows the mask of the first token, and none of those behind it.
    """

    full_sizes: tuple[int, ...] = ()
    num_awaited_graphs = 0

    def __init__(self, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.ops = CpuOps()
        self.num_masked_rows = 0
        self.first_masks: Callable[[], dict[int, Words]] = dict  # by slot
        self._newest = np.zeros(NUM_SLOTS, np.int32)
        self._drafts = np.zeros((MAX_DRAFT, NUM_SLOTS), np.int32)

    def start(self, batch: StepBatch) -> NoisyStep:
        for number, step in enumerate(batch.drafting):
            masks = {slot: words for slot, words in self.first_masks().items() if number == 0}
            chosen = [(row, masks[slot]) for row, slot in enumerate(step.sampling.slots.tolist()) if slot in masks]
            rows, words = [row for row, _ in chosen], [words for _, words in chosen]
            mask = TokenMask(np.array(rows, np.int32), np.stack(words)) if chosen else None
            before = self._drafts[number - 1] if number else self._newest
            self._drafts[number, step.sampling.slots] = self._choose(step, mask, before).token_ids
        running = NoisyStep(batch, self._drafts.copy())
        if not batch.is_constrained:
            self.sample(running, None)
        return running

    def sample(self, running: NoisyStep, mask: TokenMask | None) -> None:
        known = np.append(self._newest, self._drafts)
        running.outcome = self._choose(running.batch, mask, known)
        self._newest[running.batch.sampling.slots] = running.outcome.token_ids

    def _choose(self, batch: StepBatch, mask: TokenMask | None, known: Array) -> StepResult:
        """`known`: tokens that negative ids stand for."""
        newest = batch.input_ids[batch.logits_indices]
        newest = np.where(newest < 0, known[np.maximum(-1 - newest, 0)], newest)
        newest = np.maximum(newest, 0)  # after a row without a token, whose sequence has failed
        seeds = batch.sampling.rows["seed"].astype(np.int64)
        rows = list(zip(newest.tolist(), batch.sampling.positions.tolist(), seeds.tolist(), strict=True))
        noise = [np.random.default_rng(row).random(VOCAB_SIZE, np.float32) for row in rows]
        on_device = from_numpy(np.array(noise, np.float32).reshape(len(rows), VOCAB_SIZE), CPU)
        if mask is not None:
            self.num_masked_rows += len(mask.rows)
            words, at = from_numpy(mask.words, CPU), from_numpy(mask.rows, CPU)
            self.ops.apply_token_mask(on_device, words, at)
        logits = on_device.numpy()
        token_ids = logits.argmax(axis=1).astype(np.int32)
        token_ids[~np.isfinite(logits.max(axis=1, initial=-np.inf))] = -1
        return StepResult(token_ids)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_param: str | None = None
    error_status: int | None = None

    @property
    def text(self) -> str:
        ended = self.finish_reason == "stop" and self.token_ids[-1:] == [self.stop_token_id]
        return decode(self.token_ids[:-1] if ended else self.token_ids)


class GrammarHarness:
    """A core and what it has answered so far."""

    def __init__(self, compiler: GrammarCompiler | None, *, asynchronous: bool = False, **settings: Any) -> None:
        blocks = settings.pop("num_kv_blocks", 4096)
        limits = {"block_size": 8, "max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": 8192}
        config = EngineConfig(model="noise", **{**limits, **settings})
        drafts = config.speculation_settings
        self.runner = NoiseRunner(asynchronous=asynchronous)
        self.core = EngineCore(
            config,
            self.runner,
            vocab_size=VOCAB_SIZE,
            max_model_len=1024,
            num_kv_blocks=blocks,
            eos_token_ids=[EOS],
            grammars=compiler,
            draft_limits=fake_limits(drafts.method, drafts.num_tokens, 1024) if drafts and drafts.uses_model else None,
        )
        self.runner.first_masks = lambda: {
            each.slot: each.constraint.mask for each in self.core.scheduler.running if each.constraint is not None
        }
        self.answers: dict[str, Answer] = {}

    def add(
        self,
        name: str,
        grammar: Grammar | None = None,
        prompt: str = "Hello there!",
        siblings: Sequence[Sibling] = (),
        **params: Any,
    ) -> None:
        settings = SamplingParams(**{"max_tokens": 256, "grammar": grammar, **params})
        request = AddRequest(name, token_ids(encode(prompt)), settings, 0.0, siblings=list(siblings))
        self.answers |= {each: Answer() for each in request.request_ids}
        self.core.add_request(request, CLIENT)

    def step(self) -> None:
        for output in self.core.step().get(CLIENT, []):
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, "an answer ends once"
            answer.token_ids += output.token_ids
            answer.finish_reason = output.finish_reason
            answer.stop_token_id = output.stop_token_id
            if output.error is not None:
                answer.error, answer.error_param = output.error, output.error_param
                answer.error_status = output.error_status

    def run(self) -> dict[str, Answer]:
        while self.core.has_work:
            self.step()
        return self.answers

    def answer(self, grammar: Grammar | None = None, **params: Any) -> Answer:
        """Of one request, in the company of nobody."""
        name = f"only {len(self.answers)}"
        self.add(name, grammar, **params)
        return self.run()[name]
