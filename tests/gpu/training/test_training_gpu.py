"""Whole models trained on the GPU, against PyTorch; names with `small` also run in the emulation within minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.autograd.variable import Variable
from tessera.engine.models.config import load_config
from tessera.engine.tensor import CPU, bfloat16, float32, from_numpy
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.examples import Example
from tessera.engine.training.lora import LoraSettings, adapter_parameters, make_adapters
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.optimizers.muon import Muon, MuonSettings
from tessera.engine.training.parameters import Parameter, initial_parameters, load_parameters
from tessera.engine.training.plan import TrainingPlan, plan_supervised
from tessera.engine.training.run import RunSettings
from tessera.engine.training.trainer import Trainer
from tests.support.cases.quantisers import SCHEMES, quantised_model
from tests.support.models.tiny_models import TINY_MODELS, build, prompt
from tests.support.models.torch_models import TorchTraining
from tests.support.paths import GOLDEN
from tests.support.references.adapter_gradients import adapter_gradients, assert_alike
from tests.support.references.golden_gradients import ADAMW, MODELS, TRAINED
from tests.support.training_steps import assert_golden, loss_and_gradients

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]
MAX_LEN = 512
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_LEN,
    "n_ctx": MAX_LEN,
    "vocab_size": 1003,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Array]:
    with np.load(GOLDEN / "golden_gradients.npz") as file:
        return dict(file)


def example() -> Example:
    ids = np.array(prompt(), np.int32)
    return Example(ids, np.ones(len(ids), np.float32))


def decoder_of(f: Functions, name: str, folder: Path, dtype: Any = float32, **settings: Any) -> TrainableDecoder:
    parameters = load_parameters(build(TINY_MODELS[name], folder), f.ops, dtype)
    return TrainableDecoder(parameters, f, max_len=TINY_MODELS[name].max_model_len, **settings)


def check_golden(training: Functions, name: str, golden: dict[str, Array], folder: Path) -> None:
    assert_golden(name, loss_and_gradients(decoder_of(training, name, folder), [example()]), golden)


@pytest.mark.parametrize("name", ["llama-tied-biases", "gpt2"])
def test_loss_and_every_gradient_are_those_of_pytorch_small(
    training: Functions, name: str, golden: dict[str, Array], tmp_path: Path
) -> None:
    check_golden(training, name, golden, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_are_those_of_pytorch(
    training: Functions, name: str, golden: dict[str, Array], tmp_path: Path
) -> None:
    check_golden(training, name, golden, tmp_path)


def test_steps_of_adamw_are_those_of_pytorch(training: Functions, golden: dict[str, Array], tmp_path: Path) -> None:
    decoder = decoder_of(training, TRAINED, tmp_path)
    settings = AdamWSettings(**{name: ADAMW[name] for name in ("beta1", "beta2", "eps", "weight_decay")})
    optimizer = AdamW(list(decoder.parameters), training.ops, training.training, settings)
    trainer = Trainer(decoder, optimizer, micro_batch_tokens=1000, max_gradient_norm=ADAMW["max_gradient_norm"])
    losses = [trainer.step([example()], ADAMW["lr"]).loss for _ in golden["losses"]]
    np.testing.assert_allclose(losses, golden["losses"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=["float32", "bfloat16"])
def test_steps_of_muon_are_those_of_the_cpu_small(training: Functions, dtype: Any) -> None:
    """Wide, tall and fused matrices; from the second step on the iterations are a graph."""
    on_cpu, rng = Functions.on(CPU), np.random.default_rng(3)
    shapes = [((64, 64), (32, 32)), ((96, 64), (96,)), ((32, 96), (32,))]
    start = [rng.normal(0, 0.1, shape).astype(np.float32) for shape, _ in shapes]
    gradients = [[rng.normal(size=shape).astype(np.float32) for shape, _ in shapes] for _ in range(4)]
    found = []
    for f in (training, on_cpu):
        of_cpu = f is on_cpu
        trained = [
            Parameter(
                str(place), Variable(from_numpy(value.astype(float32 if of_cpu else dtype), f.device), True), parts
            )
            for place, (value, parts) in enumerate(
                (value, tuple((f"{rows}", rows) for rows in sizes))
                for value, (_, sizes) in zip(start, shapes, strict=True)
            )
        ]
        muon = Muon(trained, f.ops, f.training, MuonSettings())
        for step in gradients:
            for parameter, gradient in zip(trained, step, strict=True):
                parameter.variable.gradient = from_numpy(gradient, f.device)
            muon.update(0.02)
        found.append([parameter.variable.value.numpy().astype(np.float32) for parameter in trained])
    for ours, theirs, before in zip(*found, start, strict=True):
        moved = np.linalg.norm(theirs - before)
        assert np.linalg.norm(ours - theirs) < (1e-3 if dtype == float32 else 0.1) * moved


def test_checkpointed_layers_give_the_same_bits(training: Functions, tmp_path: Path) -> None:
    plain = loss_and_gradients(decoder_of(training, "qwen3", tmp_path / "a"), [example()])
    decoder = decoder_of(training, "qwen3", tmp_path / "b", checkpoints_layers=True)
    again = loss_and_gradients(decoder, [example()])
    assert plain[0] == again[0]
    for name, gradient in plain[1].items():
        np.testing.assert_array_equal(gradient, again[1][name])


def test_bfloat16_gradients_are_near_those_of_float32(training: Functions, tmp_path: Path) -> None:
    exact = loss_and_gradients(decoder_of(training, "llama", tmp_path / "a"), [example()])
    rounded = loss_and_gradients(decoder_of(training, "llama", tmp_path / "b", bfloat16), [example()])
    assert rounded[0] == pytest.approx(exact[0], rel=0.02)
    for name, gradient in exact[1].items():
        assert np.linalg.norm(rounded[1][name] - gradient) < 0.1 * np.linalg.norm(gradient), name


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_200_steps_are_those_of_pytorch(training: Functions, config: dict[str, Any], tmp_path: Path) -> None:
    """Loss and every gradient of the first step within 1e-4, then the curve of losses."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here, so nothing is compared with it")
    (tmp_path / "config.json").write_text(json.dumps(config))
    parameters = initial_parameters(load_config(tmp_path), training.ops, seed=1)
    reference = TorchTraining(torch, config, {name: tensor.numpy() for name, tensor in parameters.stored().items()})
    rng = np.random.default_rng(2)
    batches = [rng.integers(0, 60, (4, 96)).astype(np.int32) for _ in range(200)]
    decoder = TrainableDecoder(parameters, training, max_len=MAX_LEN)

    def examples(batch: Array) -> list[Example]:
        return [Example(ids, np.ones(len(ids), np.float32)) for ids in batch]

    loss, gradients = loss_and_gradients(decoder, examples(batches[0]))
    wanted_loss, wanted = reference.gradients(batches[0])
    assert loss == pytest.approx(wanted_loss, rel=1e-4)
    assert set(gradients) == set(wanted)
    for name, gradient in gradients.items():
        assert np.linalg.norm(gradient - wanted[name]) <= 1e-4 * np.linalg.norm(wanted[name]), name
    optimizer = AdamW(list(parameters), training.ops, training.training, AdamWSettings(weight_decay=0.1))
    trainer = Trainer(decoder, optimizer, micro_batch_tokens=200, max_gradient_norm=1.0)
    losses = [trainer.step(examples(batch), 1e-3).loss for batch in batches]
    expected = [reference.step(batch, 1e-3, weight_decay=0.1, max_norm=1.0) for batch in batches]
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=5e-3)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_lora_adapter_is_learnt_and_the_base_stays(training: Functions, checkpointed: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    parameters = initial_parameters(load_config(tmp_path), training.ops, bfloat16, seed=1)
    before = {name: tensor.numpy() for name, tensor in parameters.stored().items()}
    parameters.freeze()
    adapters = make_adapters(parameters, LoraSettings(), training.device, bfloat16, seed=2)
    decoder = TrainableDecoder(
        parameters, training, max_len=MAX_LEN, adapters=adapters, checkpoints_layers=checkpointed
    )
    optimizer = AdamW(list(adapter_parameters(adapters)), training.ops, training.training, AdamWSettings())
    trainer = Trainer(decoder, optimizer, micro_batch_tokens=300, max_gradient_norm=1.0)
    ids = np.random.default_rng(1).integers(0, 1000, 257).astype(np.int32)
    examples = [Example(part, np.ones(len(part), np.float32)) for part in (ids[:100], ids[100:])]
    losses = [trainer.step(examples, 5e-3).loss for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0], losses
    for name, tensor in parameters.stored().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name])


QUANTISED = [name for name in SCHEMES if "actorder" not in name]


def check_quantised(training: Functions, name: str, folder: Path) -> None:
    quantised, _ = quantised_model(folder, SCHEMES[name])
    expected = adapter_gradients(Functions.on(CPU), quantised)
    assert_alike(adapter_gradients(training, quantised), expected, 0.3 if SCHEMES[name].rounds_input else 1e-3)


def test_adapters_of_quantised_models_have_the_gradients_of_the_cpu_small(training: Functions, tmp_path: Path) -> None:
    check_quantised(training, "awq", tmp_path)


@pytest.mark.parametrize("name", QUANTISED)
def test_adapters_of_quantised_models_have_the_gradients_of_the_cpu(
    training: Functions, name: str, tmp_path: Path
) -> None:
    check_quantised(training, name, tmp_path)


def test_a_resumed_training_ends_with_the_same_bits(cuda_device: CudaDevice, tmp_path: Path) -> None:
    if cuda_device.device_name == "emulated":
        pytest.skip("the emulated device is no CudaDevice, which plans make their operations for")
    model = build(TINY_MODELS["llama"], tmp_path / "model")
    rng = np.random.default_rng(3)
    examples = [
        Example(rng.integers(0, 50, length).astype(np.int32), np.ones(length, np.float32)) for length in range(5, 25)
    ]
    plan = TrainingPlan(
        model=model,
        name="tiny",
        lora=LoraSettings(rank=4),
        run=RunSettings(num_steps=12, batch_size=5, learning_rate=1e-2, save_every=4),
        max_length=64,
        dtype=bfloat16,
        device=cuda_device,
    )

    def weights(folder: Path, stop_at: int | None) -> list[Array]:
        planned = plan_supervised(plan, folder, examples, [])
        planned.run.resume()
        planned.run.run(is_stopped=lambda: planned.run.step == stop_at)
        planned.save_adapter(folder / "adapter", "tiny")
        return [np.fromfile(folder / "adapter" / "adapter_model.safetensors", np.uint8)]

    straight = weights(tmp_path / "a", None)
    weights(tmp_path / "b", 7)
    resumed = weights(tmp_path / "b", None)
    np.testing.assert_array_equal(straight, resumed)
