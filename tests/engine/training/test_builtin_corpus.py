"""The corpus of the built-in model: how many ways each skill is asked for, and which of them stay out of training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice
from random import Random

import pytest
from tokenizers import Tokenizer

from tessera.engine.builtin.training.conversation import Conversation, Split
from tessera.engine.builtin.training.corpus import PHRASED_SKILLS, cases, conversations
from tessera.engine.builtin.training.phrasings.by_skill import BY_SKILL
from tessera.engine.builtin.training.phrasings.phrasing import core
from tessera.engine.builtin.training.render import FOLDER, render

NUM_CONVERSATIONS = 1500  # a skill


def cores(skill: str, kind: str) -> list[str]:
    return [core(phrasing) for group in BY_SKILL[skill] for phrasing in getattr(group, kind)]


def asked(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] in ("user", "system")]


def field_pattern(name: str) -> str:
    if name in ("a", "b", "minutes", "quantity", "number"):
        return r"\d+"
    return r".+" if name in ("items", "text", "question", "keys") else r"\S+"


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Conversation]]:
    rng = Random(1)
    return {
        skill: [generator(rng, "train") for _ in range(NUM_CONVERSATIONS)]
        for skill, (generator, _) in PHRASED_SKILLS.items()
    }


def test_every_skill_has_phrasings() -> None:
    assert list(BY_SKILL) == list(PHRASED_SKILLS)


@pytest.mark.parametrize("skill", BY_SKILL)
def test_there_are_many_phrasings_and_some_stay_out(skill: str) -> None:
    of_training, held_out = set(cores(skill, "trained")), set(cores(skill, "held_out"))
    assert not of_training & held_out
    assert len(of_training) >= 30
    assert len(held_out) >= 8
    assert len(held_out) == len(cores(skill, "held_out"))


@pytest.mark.parametrize("skill", BY_SKILL)
def test_held_out_phrasings_are_not_trained_on(skill: str, trained: dict[str, list[Conversation]]) -> None:
    said = {core(text) for conversation in trained[skill] for text in asked(conversation)}
    for phrasing in cores(skill, "held_out"):
        pattern = re.compile(re.sub(r"\\\{(\w+)\\\}", lambda found: field_pattern(found[1]), re.escape(phrasing)))
        found = [text for text in said if pattern.fullmatch(text)]
        assert not found, f"{phrasing!r} is said in training: {found[0]!r}"


@pytest.mark.parametrize("skill", BY_SKILL)
def test_all_trained_phrasings_are_said(skill: str, trained: dict[str, list[Conversation]]) -> None:
    mixed = islice(conversations(1, "train"), NUM_CONVERSATIONS if skill == "system prompt" else 0)
    said = " ".join(core(text) for conversation in [*trained[skill], *mixed] for text in asked(conversation))
    for phrasing in cores(skill, "trained"):
        assert all(part.strip() in said for part in re.split(r"\{\w+\}", phrasing)), phrasing


@pytest.mark.parametrize("split", ["train", "test", "phrasings"])
def test_conversations_fit_the_context(split: Split) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    context = json.loads((FOLDER / "config.json").read_text())["max_position_embeddings"]
    texts = ["".join(text for text, _ in render(each)) for each in islice(conversations(2, split), 1000)]
    assert max(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)) <= context


def test_a_word_alone_is_copied_upper_cased_and_spelt_backwards() -> None:
    changes: list[tuple[str, Callable[[str], str]]] = [
        ("copying", str),
        ("upper-casing", str.lower),
        ("reversing", lambda word: word[::-1]),
    ]
    for skill, change in changes:
        found = [case for case in cases(skill, 1, 200, "train") if "," not in case.messages[-1]["content"]]
        assert len(found) > 40
        for case in found:
            question, answer = (message["content"] for message in case.messages)
            assert change(answer) in question


def test_without_a_tool_for_it_a_request_gets_no_call() -> None:
    found = cases("no tool", 1, 200, "train")
    assert 0.5 < sum(not case.tools for case in found) / len(found) < 0.9
    assert not any(message.get("tool_calls") for case in found for message in case.messages)
