"""The trainable decoder and its optimiser against PyTorch (tests/golden), and against the decoder that serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.contract.errors import ConfigError
from tessera.engine.models.weights.safetensors import Checkpoint
from tessera.engine.tensor import CPU, bfloat16, float32
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example, micro_batches
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.parameters import load_parameters
from tessera.engine.training.trainer import Trainer
from tests.support.decoder_harness import DecoderHarness
from tests.support.models.tiny_families import FAMILIES, MAX_LEN, build_family
from tests.support.models.tiny_families import prompt as family_prompt
from tests.support.models.tiny_mixtures import TINY_MIXTURES
from tests.support.models.tiny_models import TINY_MODELS, build, prompt
from tests.support.paths import GOLDEN
from tests.support.references.golden_gradients import ADAMW, MODELS, TRAINED
from tests.support.training_steps import assert_golden, loss_and_gradients

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    with np.load(GOLDEN / "golden_gradients.npz") as file:
        return dict(file)


def example() -> Example:
    ids = np.array(prompt(), np.int32)
    return Example(ids, np.ones(len(ids), np.float32))


def decoder_of(name: str, folder: Path, dtype: np.dtype[Any] = float32, **settings: Any) -> TrainableDecoder:
    f = Functions.on(CPU)
    parameters = load_parameters(build(TINY_MODELS[name], folder), f.ops, dtype)
    return TrainableDecoder(parameters, f, max_len=TINY_MODELS[name].max_model_len, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_those_of_pytorch(name: str, golden: dict[str, Array], tmp_path: Path) -> None:
    assert_golden(name, loss_and_gradients(decoder_of(name, tmp_path), [example()]), golden)


def test_steps_of_adamw_are_those_of_pytorch(golden: dict[str, Array], tmp_path: Path) -> None:
    decoder = decoder_of(TRAINED, tmp_path)
    f = decoder.functions
    settings = AdamWSettings(**{name: ADAMW[name] for name in ("beta1", "beta2", "eps", "weight_decay")})
    optimizer = AdamW(list(decoder.parameters), f.ops, f.training, settings)
    trainer = Trainer(decoder, optimizer, micro_batch_tokens=1000, max_gradient_norm=ADAMW["max_gradient_norm"])
    losses = [trainer.step([example()], ADAMW["lr"]).loss for _ in golden["losses"]]
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-3, atol=1e-5)


def test_checkpointed_layers_give_the_same_bits(tmp_path: Path) -> None:
    plain = loss_and_gradients(decoder_of("qwen3", tmp_path / "a"), [example()])
    again = loss_and_gradients(decoder_of("qwen3", tmp_path / "b", checkpoints_layers=True), [example()])
    assert plain[0] == again[0]
    for name, gradient in plain[1].items():
        np.testing.assert_array_equal(gradient, again[1][name])


def test_packed_sequences_have_the_mean_of_their_losses(tmp_path: Path) -> None:
    """Weighted by tokens; a token without weight has no loss."""
    decoder = decoder_of("mistral-window", tmp_path)
    whole = example()
    first = Example(whole.token_ids[:15], whole.weights[:15])
    second = Example(whole.token_ids[15:], np.where(np.arange(25) < 10, 0, 0.5).astype(np.float32))
    (one, of_one), (other, of_other) = (loss_and_gradients(decoder, [each]) for each in (first, second))
    both, of_both = loss_and_gradients(decoder, [first, second])
    weights = first.total_weight, second.total_weight
    assert weights == (14, 7.5)
    assert both == pytest.approx((one * 14 + other * 7.5) / 21.5, rel=1e-5)
    for name, gradient in of_both.items():
        expected = (of_one[name] * 14 + of_other[name] * 7.5) / 21.5
        np.testing.assert_allclose(gradient, expected, atol=1e-4 * float(np.linalg.norm(expected)) + 1e-7)


def test_micro_batches_do_not_change_the_gradient(tmp_path: Path) -> None:
    """The mean is over the weighted tokens of the step, whichever of them are computed together."""
    whole, found = example(), []
    items = [
        Example(whole.token_ids[start:stop], whole.weights[start:stop]) for start, stop in ((0, 5), (5, 30), (30, 40))
    ]
    for tokens in (1, 12, 1000):
        decoder = decoder_of("qwen3", tmp_path / str(tokens))
        optimizer = AdamW(list(decoder.parameters), decoder.functions.ops, decoder.functions.training, AdamWSettings())
        trainer = Trainer(decoder, optimizer, micro_batch_tokens=tokens, max_gradient_norm=1.0)
        found.append((trainer.accumulate_gradients(items), optimizer.gradient_norm()))
        assert trainer.evaluate(items) == found[-1][0]
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)


def test_bfloat16_gradients_are_near_those_of_float32(tmp_path: Path) -> None:
    exact = loss_and_gradients(decoder_of("llama", tmp_path / "a"), [example()])
    rounded = loss_and_gradients(decoder_of("llama", tmp_path / "b", bfloat16), [example()])
    assert rounded[0] == pytest.approx(exact[0], rel=0.02)
    for name, gradient in exact[1].items():
        assert np.linalg.norm(rounded[1][name] - gradient) < 0.1 * np.linalg.norm(gradient), name


@pytest.mark.parametrize("name", [name for name in (*TINY_MODELS, *FAMILIES) if name not in MODELS])
def test_every_other_model_is_trained_as_it_is_served_or_refused(name: str, tmp_path: Path) -> None:
    """The tensors that would be saved are those that were loaded, and the loss is that of the server's logits."""
    if name in TINY_MODELS:
        folder, ids, max_len = build(TINY_MODELS[name], tmp_path), prompt(), TINY_MODELS[name].max_model_len
    else:
        folder, ids, max_len = build_family(name, tmp_path), family_prompt(), MAX_LEN
    f = Functions.on(CPU)
    try:
        parameters = load_parameters(folder, f.ops)
    except ConfigError:
        with pytest.raises(ConfigError, match="and such a model cannot be trained here"):
            load_parameters(folder, f.ops)
        assert name in FAMILIES or name in TINY_MIXTURES
        return
    checkpoint = Checkpoint(folder)
    for stored, tensor in parameters.stored().items():
        found = np.asarray(checkpoint.tensor(stored)).astype(np.float32)
        np.testing.assert_array_equal(tensor.numpy(), found, err_msg=stored)
    only = Example(np.array(ids, np.int32), np.ones(len(ids), np.float32))
    (batch,) = micro_batches([only], 10_000, only.total_weight, CPU)
    loss = float(TrainableDecoder(parameters, f, max_len=max_len).loss(*batch).value.numpy()[0])
    logits = DecoderHarness.of(folder, f.ops, float32, max_model_len=max_len).logits(ids).astype(np.float64)
    logs = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.append(ids[1:], 0)[:, None], 1)[:, 0]
    assert loss == pytest.approx(float(logs[:-1].mean()), rel=1e-4)


def test_what_cannot_be_trained_says_why(tmp_path: Path) -> None:
    f = Functions.on(CPU)
    with pytest.raises(ConfigError, match=r"model\.gguf is a GGUF file; models are trained from folders"):
        load_parameters(tmp_path / "model.gguf", f.ops)
    with pytest.raises(ConfigError, match="is a mixture of experts, and such a model cannot be trained here"):
        load_parameters(build(TINY_MODELS["mixtral"], tmp_path / "mixtral"), f.ops)
