"""Trainings from random weights: Muon against NumPy, groups of optimisers, streams of examples, and a tiny model."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tessera.engine.autograd.functions import Functions
from tessera.engine.autograd.variable import Variable
from tessera.engine.builtin.training import chat
from tessera.engine.builtin.training.conversation import Conversation
from tessera.engine.builtin.training.corpus import cases
from tessera.engine.builtin.training.exact_match import last_answer, num_right
from tessera.engine.builtin.training.render import FOLDER, render
from tessera.engine.builtin.training.rows import RowMaker, tokens_of
from tessera.engine.builtin.training.train import (
    MODEL,
    TOKENIZER,
    Pretraining,
    seconds_of_evaluation,
    steps_within,
    train,
)
from tessera.engine.contract.errors import ConfigError
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.files import SINGLE_FILE
from tessera.engine.tensor import CPU, bfloat16, from_numpy
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.optimizers.groups import OptimizerGroups
from tessera.engine.training.optimizers.muon import COEFFICIENTS, NUM_ITERATIONS, Muon, MuonSettings
from tessera.engine.training.parameters import Parameter, load_parameters
from tessera.engine.training.stream import ExampleStream
from tests.support.models.tiny_pretraining import make_base, settings_in, trained

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / TOKENIZER))


def parameter(name: str, value: Array, *parts: int) -> Parameter:
    variable = Variable(from_numpy(value, CPU), requires_grad=True)
    return Parameter(name, variable, tuple((f"{name}.{place}", rows) for place, rows in enumerate(parts)))


# -- Muon -------------------------------------------------------------------------------------------


def orthogonal(x: Array) -> Array:
    """Muon's iteration in float64, on the smaller side."""
    a, b, c = COEFFICIENTS
    x = x / (np.linalg.norm(x) + 1e-7)
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("parts", [(8, 16, 40), (24,)], ids=["fused", "whole"])
def test_muon_against_numpy(parts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    shape, rate, factor = (sum(parts), 16 if len(parts) > 1 else 48), 0.02, 0.5
    start = rng.normal(size=shape)
    weight, momentum = start.copy(), np.zeros(shape)
    f, trained = Functions.on(CPU), parameter("w", start.astype(np.float32), *parts)
    muon = Muon([trained], f.ops, f.training, MuonSettings(momentum=0.9, weight_decay=0.1))
    for _ in range(3):
        gradient = rng.normal(size=shape)
        trained.variable.gradient = from_numpy(gradient.astype(np.float32), CPU)
        muon.update(rate, factor)
        momentum = 0.9 * momentum + 0.1 * factor * gradient
        mixed = 0.9 * momentum + 0.1 * factor * gradient
        first = 0
        for rows in parts:
            part = slice(first, first + rows)
            first += rows
            step = orthogonal(mixed[part]) * max(1, rows / shape[1]) ** 0.5
            weight[part] = weight[part] * (1 - rate * 0.1) - rate * step
    np.testing.assert_allclose(trained.variable.value.numpy(), weight, atol=2e-5)
    assert trained.variable.gradient is None
    assert np.linalg.norm(weight - start) > 0.1


def test_the_iteration_makes_singular_values_nearly_equal() -> None:
    x = np.random.default_rng(1).normal(size=(20, 50))
    values = np.linalg.svd(orthogonal(x), compute_uv=False)
    assert 0.6 < values.min() <= values.max() < 1.3


def test_groups_take_their_shares_of_the_learning_rate() -> None:
    f = Functions.on(CPU)
    values = [np.ones((4, 8), np.float32), np.ones(8, np.float32)]
    grouped, alone = ([parameter(str(place), value, len(value)) for place, value in enumerate(values)] for _ in "ab")
    muon, adamw = (
        Muon(grouped[:1], f.ops, f.training, MuonSettings()),
        AdamW(grouped[1:], f.ops, f.training, AdamWSettings()),
    )
    groups = OptimizerGroups([(muon, 1.0), (adamw, 0.25)], f.ops)
    reference = AdamW(alone[1:], f.ops, f.training, AdamWSettings())
    for each in (*grouped, *alone):
        each.variable.gradient = from_numpy(np.full(each.variable.shape, 2.0, np.float32), CPU)
    assert groups.gradient_norm() == pytest.approx(math.sqrt(40 * 4))
    groups.update(0.1)
    reference.update(0.025)
    np.testing.assert_array_equal(grouped[1].variable.value.numpy(), alone[1].variable.value.numpy())
    assert [name for name, _ in groups.tensors()] == ["master/0", "momentum/0", "master/1", "first/1", "second/1"]
    assert groups.step == muon.step == adamw.step == 1


# -- rows -------------------------------------------------------------------------------------------


def test_rows_are_the_same_whoever_makes_them(tmp_path: Path, base: Path) -> None:
    maker = RowMaker(base / TOKENIZER, 3, 100, seed=4)
    with ExampleStream(maker, maker.digest, 0) as here, ExampleStream(maker, maker.digest, 2) as there:
        for step in (5, 6, 2, 3):  # a resumed training begins anywhere
            for one, other in zip(here.batch(step), there.batch(step), strict=True):
                np.testing.assert_array_equal(one.token_ids, other.token_ids)
                np.testing.assert_array_equal(one.weights, other.weights)
    assert not np.array_equal(maker(1)[0].token_ids, maker(2)[0].token_ids)
    assert maker.digest != RowMaker(base / TOKENIZER, 3, 100, seed=5).digest


def test_cut_prompts_say_the_same(tokenizer: Tokenizer) -> None:
    for skill in ("reading", "tool result", "reversing"):
        for case in cases(skill, 1, 30, "train"):
            text = "".join(text for text, _ in render(case))
            plain, counted = tokens_of(tokenizer, case)
            cut, also_counted = tokens_of(tokenizer, case, Random(1))
            assert tokenizer.decode(plain, skip_special_tokens=False) == text
            assert tokenizer.decode(cut, skip_special_tokens=False) == text
            assert len(cut) > len(plain)
            answers = [[i for i, c in zip(*each, strict=True) if c] for each in ((plain, counted), (cut, also_counted))]
            assert answers[0] == answers[1]


def test_words_are_spelt_backwards_letter_by_letter(tokenizer: Tokenizer) -> None:
    case = (
        Conversation("reversing", spelt={"elbat"})
        .user("Reverse table")
        .assistant("elbat")
        .user("Hi")
        .assistant("table")
    )
    ids, counted = tokens_of(tokenizer, case)
    answers = [tokenizer.decode([i], skip_special_tokens=False) for i, c in zip(ids, counted, strict=True) if c]
    assert answers[:6] == ["e", "l", "b", "a", "t", "<|im_end|>"]
    assert len(answers) < 12


# -- a tiny model -----------------------------------------------------------------------------------


def greetings(tokenizer_file: Path, step: int) -> list[Example]:
    rng, tokenizer = Random(step), Tokenizer.from_file(str(tokenizer_file))
    found = [tokens_of(tokenizer, chat.greeting(rng, "train")) for _ in range(12)]
    return [Example(np.array(ids, np.int32), np.array(counted, np.float32)) for ids, counted in found]


def test_a_tiny_model_learns_to_greet(tmp_path: Path, base: Path, tokenizer: Tokenizer) -> None:
    settings = settings_in(tmp_path / "out", base, num_steps=200, num_rows=12, save_every=1000)
    with ExampleStream(partial(greetings, settings.out / TOKENIZER), "greetings", 0) as stream:
        training = Pretraining(settings, Functions.on(CPU), stream)
        training.run.run()
    assert training.run.records[0].loss > 7
    assert training.run.records[-1].loss < 0.3
    held_out = [last_answer(*tokens_of(tokenizer, case)) for case in cases("greeting", 1, 60)]
    assert num_right(training.decoder, held_out, 1000) >= 50
    folder = training.save()
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*(path.name for path in base.iterdir()), SINGLE_FILE]
    )
    assert load_config(folder).torch_dtype == bfloat16
    f = Functions.on(CPU)
    assert num_right(TrainableDecoder(load_parameters(folder, f.ops), f, max_len=256), held_out, 1000) >= 48
    further = settings_in(tmp_path / "further", folder, keeps_weights=True, num_steps=1, num_rows=12)
    with ExampleStream(partial(greetings, further.out / TOKENIZER), "greetings", 0) as stream:
        training = Pretraining(further, f, stream)
        training.run.run()
    assert training.run.records[0].loss < 0.4


def test_a_killed_training_goes_on_with_the_same_bits(tmp_path: Path, base: Path) -> None:
    whole, stopped = (settings_in(tmp_path / name, base, num_steps=6, save_every=2) for name in ("whole", "stopped"))
    trained(stopped, Functions.on(CPU), stop=3)
    assert trained(stopped, Functions.on(CPU)) == trained(whole, Functions.on(CPU))


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path: Path, base: Path) -> None:
    small = make_base(tmp_path / "small", vocab_size=1000)
    settings = settings_in(tmp_path / "out", small)
    with pytest.raises(ConfigError, match="has 2560 tokens, more than the 1000"):
        Pretraining(settings, Functions.on(CPU), ExampleStream(partial(greetings, small / TOKENIZER), "greetings", 0))


def test_steps_fit_the_time_with_their_evaluations(tmp_path: Path) -> None:
    settings = replace(settings_in(tmp_path, FOLDER), evaluate_every=1000, num_cases=100)
    alone = steps_within(500, 0.1, replace(settings, evaluate_every=0))
    together = steps_within(500, 0.1, settings)
    assert 4400 < together < alone < 5000
    assert together * 0.1 + together // 1000 * seconds_of_evaluation(100) < 500
    assert steps_within(-1, 0.1, settings) == 1


def test_a_training_ends_in_time_and_its_model_is_written(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "out", make_base(tmp_path / "base"), num_rows=8, num_steps=1000)
    said: list[str] = []
    training = train(settings, Functions.on(CPU), said.append, stop_at=0.0)
    assert training.run.step == 1
    assert "time is up after step 1 of 1000" in said
    assert (settings.out / MODEL / "model.safetensors").is_file()
