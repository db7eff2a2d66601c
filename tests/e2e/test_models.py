"""What comes out of a served model, over HTTP: reference tokens, log-probabilities, every sampling parameter."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, make_tensors, prompt
from tests.support.references.llama_reference import log_softmax, logits_after, penalised
from tests.support.servers.server_fixture import Server, async_client, stream_answer

EOS = 2
PROMPT = prompt()[:12]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def greedy(tiny_server: Server) -> list[int]:
    return tiny_server.tokens(PROMPT, NUM_TOKENS)


class Reference:
    """The tiny model's logits, computed here."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._tensors = make_tensors(TINY_MODELS["llama"])

    def logits(self, token_ids: list[int]) -> np.ndarray[Any, Any]:
        return logits_after(self._config, self._tensors, token_ids)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Reference:
    return Reference(tiny_folder)


# -- a real model ---------------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.parametrize("case", [0, 1])
def test_a_story_is_the_reference_s_token_for_token(story_server: Server, shared_models: Path, case: int) -> None:
    expected = json.loads((shared_models / "stories260K" / "greedy_ref.json").read_text())["cases"][case]
    whole = story_server.complete(expected["prompt_ids"], 120, echo=True, ignore_eos=False)
    streamed = story_server.streamed(expected["prompt_ids"], 120, echo=True, ignore_eos=False)
    for answer in (whole, streamed):
        assert answer.token_ids == expected["greedy_ids"]
        assert answer.text == expected["text"].removeprefix(" ")  # a text does not begin with its tokens' space
        assert answer.finish_reason == "length"


@pytest.mark.shared
def test_a_story_told_by_text_prompt(story_server: Server, shared_models: Path) -> None:
    expected = json.loads((shared_models / "stories260K" / "greedy_ref.json").read_text())["cases"][1]
    answer = story_server.complete("Once upon a time", 120)
    assert answer.token_ids == expected["greedy_ids"]
    assert "Once upon a time" + answer.text == expected["text"].removeprefix(" ")


# -- numbers --------------------------------------------------------------------------------------


def test_greedy_tokens_are_the_reference_s(greedy: list[int], reference: Reference) -> None:
    for length, token_id in enumerate(greedy):
        assert reference.logits(PROMPT + greedy[:length]).argmax() == token_id


def test_logprobs_are_the_log_softmax_of_the_model_s_logits(
    tiny_server: Server, tiny_folder: Path, reference: Reference
) -> None:
    """Also of a sampled and penalised request: they are reported as the model gave them."""
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    fields = {"temperature": 1.3, "seed": 5, "top_k": 40, "presence_penalty": 1.0, "logprobs": 4}
    (choice,) = tiny_server.post(tiny_server.body(PROMPT, 10, **fields))["choices"]
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]
    assert len(token_ids) == len(logprobs["token_logprobs"]) == 10
    for index, token_id in enumerate(token_ids):
        expected = log_softmax(reference.logits(PROMPT + token_ids[:index]))
        best = set(np.argsort(expected)[-4:].tolist()) | {token_id}
        spelled = {tokenizer.decode([i], skip_special_tokens=False): expected[i] for i in best}
        assert logprobs["tokens"][index] == tokenizer.decode([token_id], skip_special_tokens=False)
        assert logprobs["token_logprobs"][index] == pytest.approx(expected[token_id], abs=1e-4)
        assert logprobs["top_logprobs"][index] == pytest.approx(spelled, abs=1e-4)


def test_wire_11_a_prompt_is_scored_without_an_answer(
    tiny_server: Server, tiny_folder: Path, reference: Reference
) -> None:
    """As evaluation harnesses ask for it; with two answers, streamed or not, it is the same."""
    tokenizer = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    spelled = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in PROMPT]
    expected = [log_softmax(reference.logits(PROMPT[:end])) for end in range(1, len(PROMPT))]
    scores = [row[token_id] for row, token_id in zip(expected, PROMPT[1:], strict=True)]
    answer = tiny_server.post(tiny_server.body(PROMPT, 0, echo=True, logprobs=1))
    assert answer["usage"]["completion_tokens"] == 0
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == spelled
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1:] == pytest.approx(scores, abs=1e-4)
    for found, row, text in zip(logprobs["top_logprobs"][1:], expected, spelled[1:], strict=True):
        best = tokenizer.decode([int(row.argmax())], skip_special_tokens=False)
        assert found[best] == pytest.approx(row.max(), abs=1e-4)
        assert text in found
    body = tiny_server.body(PROMPT, 3, echo=True, logprobs=0, n=2, seed=1, temperature=1.0)
    whole = tiny_server.post(body)["choices"]
    pieces: list[list[Any]] = [[], []]
    with tiny_server.stream({**body, "stream": True}) as chunks:
        for chunk in chunks:
            for part in chunk["choices"]:
                pieces[part["index"]] += part["logprobs"]["token_logprobs"] if part["logprobs"] else []
    for one, streamed in zip(whole, pieces, strict=True):
        values = one["logprobs"]["token_logprobs"]
        assert len(values) == len(PROMPT) + 3
        assert (values[0], streamed[0]) == (None, None)
        assert values[1:] == pytest.approx(streamed[1:], abs=1e-4)
        assert values[1 : len(PROMPT)] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.4, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.9), (0.9, -0.4, 0.7)]
)
def test_penalties_do_what_their_formulas_say(
    tiny_server: Server,
    greedy: list[int],
    reference: Reference,
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    found = tiny_server.tokens(
        PROMPT,
        NUM_TOKENS,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    assert found != greedy
    for length, token_id in enumerate(found):
        logits = reference.logits(PROMPT + found[:length])
        adjusted = penalised(
            logits, PROMPT, found[:length], repetition=repetition, presence=presence, frequency=frequency
        )
        assert adjusted.argmax() == token_id


# -- sampling parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"top_n_sigma": 1e-4}, {"temperature": 1e-4}]
)
def test_the_narrowest_sampling_is_greedy(tiny_server: Server, greedy: list[int], narrow: dict[str, Any]) -> None:
    assert tiny_server.tokens(PROMPT, NUM_TOKENS, **{"temperature": 1.5, "seed": 3, **narrow}) == greedy


@pytest.mark.parametrize("wider", [{"temperature": 1.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_filters_and_temperature_shape_what_is_sampled(
    tiny_server: Server, greedy: list[int], reference: Reference, wider: dict[str, Any]
) -> None:
    found = tiny_server.tokens(PROMPT, NUM_TOKENS, **{"temperature": 1.0, "seed": 3, **wider})
    assert found != greedy
    ranks, ratios, before = [], [], []
    for length, token_id in enumerate(found):
        probabilities = np.exp(log_softmax(reference.logits(PROMPT + found[:length])))
        likelier = probabilities > probabilities[token_id]
        ranks.append(int(likelier.sum()))
        ratios.append(probabilities[token_id] / probabilities.max())
        before.append(probabilities[likelier].sum())
    # A tolerance for float32: a token on the edge of a filter may fall on either side.
    assert max(ranks) < wider.get("top_k", VOCAB_SIZE)
    assert min(ratios) >= wider.get("min_p", 0.0) - 1e-5
    assert max(before) < wider.get("top_p", 1.0) + 1e-5
    if "temperature" in wider:
        assert max(ranks) > 3, "at this temperature unlikely tokens are chosen as well"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logit_bias_forces_and_forbids(tiny_server: Server, greedy: list[int], temperature: float) -> None:
    forced = tiny_server.tokens(PROMPT, 6, temperature=temperature, logit_bias={"77": 100})
    assert forced == [77] * 6
    forbidden = {str(token_id): -100 for token_id in set(greedy)}
    others = tiny_server.tokens(PROMPT, NUM_TOKENS, temperature=temperature, logit_bias=forbidden)
    assert not set(others) & set(greedy)


def test_ends_and_their_suppression(tiny_server: Server, greedy: list[int]) -> None:
    eager = {"logit_bias": {str(EOS): 100}, "ignore_eos": False}
    at_once = tiny_server.complete(PROMPT, 8, **eager)
    assert (at_once.token_ids, at_once.text, at_once.finish_reason) == ([EOS], "", "stop")
    later = tiny_server.complete(PROMPT, 8, min_tokens=5, **eager)
    assert (len(later.token_ids), later.token_ids.index(EOS), later.finish_reason) == (6, 5, "stop")
    ignored = tiny_server.complete(PROMPT, 8, **{**eager, "ignore_eos": True})
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS] * 8, "length")
    fourth = greedy[3]
    stopped = tiny_server.complete(PROMPT, NUM_TOKENS, stop_token_ids=[fourth])
    assert stopped.token_ids == greedy[: greedy.index(fourth) + 1]
    assert stopped.finish_reason == "stop"


def test_stop_strings_end_the_text_and_the_work(tiny_server: Server, greedy: list[int]) -> None:
    text = tiny_server.complete(PROMPT, NUM_TOKENS).text
    stop = text[5:7]
    expected = text[: text.index(stop)]
    for answer in (tiny_server.complete(PROMPT, 4000, stop=stop), tiny_server.streamed(PROMPT, 4000, stop=[stop])):
        assert (answer.text, answer.finish_reason) == (expected, "stop")
    tiny_server.until_idle()
    kept = tiny_server.complete(PROMPT, NUM_TOKENS, stop=stop, include_stop_str_in_output=True)
    assert kept.text == expected + stop


# -- seeds and neighbours -------------------------------------------------------------------------


def test_a_seed_decides_the_tokens(tiny_server: Server) -> None:
    def sampled(seed: int) -> list[int]:
        return tiny_server.tokens(PROMPT, NUM_TOKENS, temperature=1.0, seed=seed)

    assert sampled(7) == sampled(7)
    assert sampled(7) != sampled(8)
    several = tiny_server.post(tiny_server.body(PROMPT, NUM_TOKENS, temperature=1.0, seed=7, n=3))["choices"]
    assert [choice["token_ids"] for choice in several] == [sampled(7), sampled(8), sampled(9)]
    unseeded = [tiny_server.tokens(PROMPT, NUM_TOKENS, temperature=1.0) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_neighbours_change_nothing(tiny_server: Server, greedy: list[int]) -> None:
    """Seeded and greedy requests in one batch with others that use every kind of sampling."""
    body = tiny_server.body
    watched = [
        body(PROMPT, NUM_TOKENS),
        body(PROMPT, NUM_TOKENS, temperature=1.0, seed=7),
        body(PROMPT[:5], NUM_TOKENS, temperature=1.4, seed=8, top_k=20, frequency_penalty=1.0),
        body(PROMPT[3:], NUM_TOKENS, temperature=0.8, seed=9, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    ]
    company = [
        body(PROMPT[i:], 10 + i, temperature=i / 4, top_k=i, logit_bias={str(i): 100}, presence_penalty=2, logprobs=i)
        for i in range(1, 8)
    ]
    alone = [tiny_server.tokens(**_as_arguments(request)) for request in watched]
    assert alone[0] == greedy

    async def together() -> list[list[int]]:
        async with async_client(tiny_server) as client:
            answers = await asyncio.gather(*(stream_answer(client, request) for request in company + watched))
            return [answer.token_ids for answer in answers[len(company) :]]

    assert asyncio.run(together()) == alone


def _as_arguments(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name not in ("model", "return_token_ids")}
