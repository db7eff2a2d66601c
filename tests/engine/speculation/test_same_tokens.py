"""With drafts of any method a request gets what it gets without, from real forwards on the CPU.

Each seed is a world: requests of every kind, how they are scheduled, and how often a model that drafts is right. The
random model is tiny; the trained one is the demonstration model. `make test-long` has more of them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tessera.app.text.detokenizer import Detokenizer, DetokenizerFactory
from tessera.app.text.tokenizer import load_tokenizer
from tessera.engine.contract.sampling_params import Grammar, SamplingParams
from tests.support.models.drafted_models import METHODS, DraftedModel, random_model, trained_model
from tests.support.paths import BUILTIN
from tests.support.speculation import (
    Asked,
    Told,
    ask_all,
    assert_same,
    num_accepted,
    num_drafted,
    predicted,
    repeated,
)

MAX_TOKENS = 16
WORLDS_PER_OPTION = 20  # of `--worlds`, one for each method
QUESTIONS = (
    "Copy this list: river, stone, 41, apple, 7, river, stone",
    "Repeat these items: green, blue, 305, green, blue, 12",
    "Extract name and age as JSON: Maria is 31 years old.",
    "What is 357 + 468?",
)
PERSON = {
    "type": "object",
    "properties": {"identification": {"enum": ["unknown", "unclear"]}, "is_registered": {"type": "boolean"}},
    "required": ["identification", "is_registered"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("regex", "The answer is (yes|no), (for sure|perhaps)\\."),
    Grammar("choice", json.dumps(["river, stone", "river, stones and more", "green"])),
)


class Questions:
    """A model, requests of every kind, and what they get without drafts."""

    def __init__(self, model: DraftedModel, prompts: list[list[int]]) -> None:
        self.model = model
        factory = DetokenizerFactory(load_tokenizer(model.folder))
        self.detokenizer: Callable[[], Detokenizer] = partial(factory.make, skip_special_tokens=True, at_start=True)
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        plain = self._ask([Asked(prompt, params) for prompt in prompts])
        of_prompts = [self._kinds(prompt, told) for prompt, told in zip(prompts, plain, strict=True)]
        self.asked = [kinds[number % len(prompts)] for number, kinds in enumerate(zip(*of_prompts, strict=True))]
        self.expected = self._ask(self.asked)

    def _ask(self, asked: list[Asked]) -> list[Told]:
        return ask_all(self.model.plain_core(), asked, detokenizer=self.detokenizer)

    def _kinds(self, prompt: list[int], plain: Told) -> list[Asked]:
        """Requests whose settings concern what the model says to the prompt."""
        said, text = plain.token_ids, plain.text
        allowed = sorted({*range(3, self.model.vocab_size // 2), *said[::2]})
        greedy: list[dict[str, Any]] = [
            {"logprobs": 2, "prompt_logprobs": 1},
            {"stop_token_ids": (said[5], said[9])},
            {"min_tokens": 12, "stop_token_ids": (said[0], said[4])},
            {"bad_words": ((said[2],), tuple(said[6:8])), "logprobs": 0},
            {"allowed_token_ids": tuple(allowed), "min_tokens": 8},
            {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
            {"logit_bias": {said[1]: -5.0, said[3]: 4.0}, "frequency_penalty": 1.5},
            *({"grammar": grammar} for grammar in GRAMMARS if self.model.compiler is not None),
        ]
        sampled: list[dict[str, Any]] = [
            {"temperature": 0.7, "seed": 11, "top_p": 0.9},
            {"temperature": 0.4, "seed": 12, "top_k": 5, "min_p": 0.05, "logprobs": 0},
            {"temperature": 1.0, "seed": 13, "top_n_sigma": 1.0, "presence_penalty": 1.0, "min_tokens": 9},
        ]
        made = [SamplingParams(max_tokens=MAX_TOKENS, **{"temperature": 0.0, **each}) for each in (*greedy, *sampled)]
        stops = Asked(prompt, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0), stops=(text[-6:-3], text[7:9]))
        return [Asked(prompt, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)), stops] + [
            Asked(prompt, params) for params in made
        ]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Questions]]:
    made: dict[str, Questions] = {}

    def make(name: str) -> Questions:
        if name not in made:
            model = (trained_model if name == "trained" else random_model)(tmp_path_factory.mktemp(name))
            made[name] = Questions(model, trained_prompts() if name == "trained" else random_prompts(model))
        return made[name]

    yield make
    for each in made.values():
        each.model.close()


def trained_prompts() -> list[list[int]]:
    texts = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in QUESTIONS]
    return load_tokenizer(BUILTIN).encode_all(texts, add_special_tokens=False)


def random_prompts(model: DraftedModel) -> list[list[int]]:
    return [repeated(number, model.vocab_size, 18 + 5 * number) for number in range(4)]


def play_world(seed: str, method: str, asked_of: Questions, *, is_crowded: bool) -> Counter[str]:
    """A world's requests with drafts and without; -> what happened in it."""
    rng = random.Random(seed)
    chosen = rng.sample(range(len(asked_of.asked)), 7)
    chosen += rng.choices(chosen, k=2)  # from the prefix cache, perhaps
    asked, expected = [asked_of.asked[number] for number in chosen], [asked_of.expected[number] for number in chosen]
    core = asked_of.model.core(
        method,
        [[*each.prompt, *told.token_ids] for each, told in zip(asked, expected, strict=True)],
        rate=rng.choice((0.0, 0.6, 0.9, 1.0)),
        ahead=rng.random() < 0.5,
        speculation=rng.choice(("on", "on", "on", "auto")),
        num_speculative_tokens=rng.choice((1, 3, 7)),
        num_kv_blocks=10 if is_crowded else 256,
        max_num_batched_tokens=rng.choice((9, 16, 64)),
        prefix_caching=rng.random() < 0.8,
    )
    if method == "prediction":
        asked = predicted(asked, expected)
    told = ask_all(core, asked, at_once=rng.choice((1, 3, 9)), detokenizer=asked_of.detokenizer)
    assert_same(told, expected)
    assert core.stats().num_used_blocks == 0
    speculator = core.metrics.speculator
    assert speculator is not None
    assert speculator.num_accepted_by_position == sorted(speculator.num_accepted_by_position, reverse=True)
    assert sum(speculator.num_accepted_by_position) == speculator.num_accepted_tokens == num_accepted(told)
    return Counter(
        accepted=num_accepted(told),
        rejected=num_drafted(told) - num_accepted(told),
        preempted=core.metrics.num_preemptions,
        cached=sum(each.last.num_cached_tokens for each in told if each.last is not None),
    )


@pytest.mark.parametrize("method", METHODS)
def test_requests_get_what_they_get_without_drafts(
    questions: Callable[[str], Questions], method: str, pytestconfig: pytest.Config
) -> None:
    happened: Counter[str] = Counter()
    for number in range(-(-int(pytestconfig.getoption("worlds")) // WORLDS_PER_OPTION)):
        seed = f"{method} {number}"
        print(f"seed {seed!r}, so far {dict(happened)}")
        asked_of = questions("trained" if number % 4 == 3 else "random")
        happened += play_world(seed, method, asked_of, is_crowded=number % 3 == 1)
    print(dict(happened))
    assert set(happened) == {"accepted", "rejected", "preempted", "cached"}


def test_earlier_completions_are_looked_into(questions: Callable[[str], Questions]) -> None:
    asked_of = questions("random")
    core = asked_of.model.core("suffix", [], 0.0)
    first = ask_all(core, asked_of.asked, detokenizer=asked_of.detokenizer)
    again = ask_all(core, asked_of.asked, detokenizer=asked_of.detokenizer)
    assert_same(again, first)
    assert num_accepted(again) > num_accepted(first)


def test_a_prediction_is_accepted_as_far_as_it_is_right(questions: Callable[[str], Questions]) -> None:
    model = questions("random").model
    prompt = [random.Random(5).randrange(3, model.vocab_size) for _ in range(20)]
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True)
    [plain] = ask_all(model.plain_core(), [Asked(prompt, params)])
    right = plain.token_ids
    wrong = [*right[:12], 3, 3, *right[12:]]
    for prediction, most_steps in ((right, 8), (wrong, 16)):
        core = model.core("prediction", [], 0.0, prompt_lookup_min=4)
        [told] = ask_all(core, [Asked(prompt, params, prediction)])
        assert told.token_ids == right
        assert core.num_steps <= most_steps
        assert num_accepted([told]) > 25


@pytest.mark.parametrize("method", METHODS)
def test_one_step_does_not_pass_the_limit_of_tokens(questions: Callable[[str], Questions], method: str) -> None:
    model = questions("random").model
    prompt = repeated(0, model.vocab_size, 30)
    for max_tokens in range(1, 10):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        [told] = ask_all(model.core(method, [], 0.0), [Asked(prompt, params, prompt)])
        assert len(told.token_ids) == max_tokens
