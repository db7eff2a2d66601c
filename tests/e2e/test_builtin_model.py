"""The model that comes with the project answers rightly, through OpenAI's SDK, against a real server on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tessera.engine.builtin.training.conversation import Conversation
from tessera.engine.builtin.training.corpus import SKILLS, cases
from tessera.engine.builtin.training.render import render
from tests.evaluation.judge import is_right, request_of
from tests.support.paths import BUILTIN
from tests.support.servers.server_fixture import Server

FOLDER = BUILTIN
CASES, SEED = 4, 3  # a skill; the model gets all of these right


@pytest.fixture(scope="module")
def client(builtin_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{builtin_server.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def test_it_is_served_when_no_model_is_named(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tessera-builtin"]


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_cases_are_answered_rightly(client: OpenAI, skill: str) -> None:
    for case in cases(skill, seed=SEED, count=CASES):
        message = client.chat.completions.create(**request_of(case, "tessera-builtin")).choices[0].message
        assert is_right(case, message.model_dump()), (case.messages, message)


def test_a_streamed_answer_is_the_same(client: OpenAI) -> None:
    (case,) = cases("reversing", seed=2, count=1)
    chunks = client.chat.completions.create(**request_of(case, "tessera-builtin"), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == case.messages[-1]["content"]


def test_a_fact_is_found_far_back_in_the_context(client: OpenAI) -> None:
    talk: list[Any] = []
    for number in range(20):
        talk += [
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": f"{number} + 1 = {number + 1}"},
        ]
    told: list[Any] = [
        {"role": "user", "content": "My name is Anna."},
        {"role": "assistant", "content": "Nice to meet you, Anna."},
    ]
    question: Any = {"role": "user", "content": "What is my name?"}
    answer = client.chat.completions.create(model="tessera-builtin", messages=[*told, *talk, question], temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 600
    assert answer.choices[0].message.content == "Your name is Anna."


def test_it_keeps_to_its_bounds() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000
    assert 2000 <= config["vocab_size"] <= 4000
    assert config["max_position_embeddings"] >= 2048


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_cases_do_not_occur_in_training(skill: str) -> None:
    held_out = {_prompt(case) for case in cases(skill, seed=1, count=100)}
    assert not held_out & {_prompt(case) for case in cases(skill, seed=1, count=200, split="train")}


def _prompt(case: Conversation) -> str:
    return "".join(text for text, _ in render(case)[:-2])
