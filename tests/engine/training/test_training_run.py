"""Trainings from start to end: resumed after a kill, schedules, orders, adapters, and models that the server loads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tessera.engine.autograd.functions import Functions
from tessera.engine.contract.errors import ConfigError, ModelError, TesseraError
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, Device, bfloat16, float32, from_numpy
from tessera.engine.training.decoder import TrainableDecoder
from tessera.engine.training.device_share import INTERVAL, DeviceShare
from tessera.engine.training.examples import Example, ExampleOrder
from tessera.engine.training.lora import (
    Adapter,
    LoraSettings,
    adapter_parameters,
    load_adapter,
    make_adapters,
    merge,
    save_adapter,
)
from tessera.engine.training.model_folder import save_model
from tessera.engine.training.optimizers.adamw import AdamW, AdamWSettings
from tessera.engine.training.parameters import Parameters, load_parameters
from tessera.engine.training.run import METRICS_FILE, StepRecord
from tessera.engine.training.schedule import share_of_peak
from tessera.engine.training.tensor_files import load_tensors, save_tensors
from tessera.engine.training.trainer import Trainer
from tests.support.decoder_harness import DecoderHarness
from tests.support.models.tiny_models import TINY_MODELS, build, prompt
from tests.support.paths import ROOT
from tests.support.processes.training_child import SETTINGS, examples, training

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["llama-tied-biases"], tmp_path_factory.mktemp("model"))


def state_of(optimizer: AdamW) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in optimizer.tensors()}


def losses_of(records: list[StepRecord]) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in records]


# -- resuming ---------------------------------------------------------------------------------------


def test_a_killed_training_ends_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    whole, optimizer = training(model, tmp_path / "whole")
    whole.run()
    command = [sys.executable, "-m", "tests.support.processes.training_child", str(model), str(tmp_path / "killed")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 8:
                child.send_signal(signal.SIGKILL)
                break
    resumed, of_resumed = training(model, tmp_path / "killed")
    step = resumed.resume()
    assert 6 <= step < SETTINGS.num_steps
    assert step % SETTINGS.save_every == 0
    resumed.run()
    assert state_of(of_resumed) == state_of(optimizer)
    assert losses_of(resumed.records) == losses_of(whole.records)
    lines = (tmp_path / "killed" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, SETTINGS.num_steps + 1))


def test_a_checkpoint_that_was_being_written_does_not_count(model: Path, tmp_path: Path) -> None:
    first, _ = training(model, tmp_path, replace(SETTINGS, num_steps=6))
    first.run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000006"]
    (tmp_path / "checkpoints" / "step-00000006").rename(tmp_path / "checkpoints" / ".step-00000006.partial")
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 7, "lo')  # cut off
    again, _ = training(model, tmp_path, replace(SETTINGS, num_steps=6))
    assert again.resume() == 3
    assert [record.step for record in again.records] == [1, 2, 3]


def test_a_checkpoint_of_another_training_is_refused(model: Path, tmp_path: Path) -> None:
    first, _ = training(model, tmp_path, replace(SETTINGS, num_steps=3))
    first.run()
    other, _ = training(model, tmp_path, replace(SETTINGS, num_steps=3, seed=4))
    with pytest.raises(ConfigError, match=r"is of another training: its seed is 3, and here it is 4"):
        other.resume()


def test_without_a_checkpoint_a_resumed_training_begins(model: Path, tmp_path: Path) -> None:
    assert training(model, tmp_path)[0].resume() == 0


# -- orders and schedules ---------------------------------------------------------------------------


def test_every_epoch_has_every_example_in_an_order_of_its_own() -> None:
    order = ExampleOrder(10, 4, seed=1)
    epochs = [[index for step in range(3) for index in order.batch(3 * epoch + step)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == [index for step in range(3) for index in ExampleOrder(10, 4, seed=1).batch(step)]
    assert epochs[0] != [index for step in range(3) for index in ExampleOrder(10, 4, seed=2).batch(step)]


def test_schedules() -> None:
    cosine = [share_of_peak("cosine", step, 100, 10) for step in range(100)]
    assert cosine[0] == pytest.approx(0.1)
    assert cosine[9] == cosine[10] == 1
    assert cosine[55] == pytest.approx(0.5)
    assert cosine[99] < 0.001
    assert share_of_peak("linear", 55, 100, 10) == pytest.approx(0.5)
    assert share_of_peak("constant", 99, 100, 10) == 1
    assert share_of_peak("hold", 39, 100, 10) == 1
    assert share_of_peak("hold", 70, 100, 10) == pytest.approx(0.5)
    assert share_of_peak("cosine", 0, 1, 0) == 1


def test_a_loss_that_is_not_finite_ends_the_training(model: Path) -> None:
    f = Functions.on(CPU)
    parameters = load_parameters(model, f.ops)
    parameters.variable(None, "embedding").value.numpy()[...] = np.inf
    trainer = trainer_of(parameters, f, list(parameters))
    with pytest.raises(TesseraError, match=r"step 1: the loss is nan .* a lower learning rate may help"):
        trainer.step(examples(2), 0.1)
    with pytest.raises(TesseraError, match="no token of these examples has a weight"):
        trainer.step([Example(np.array([1, 2], np.int32), np.zeros(2, np.float32))], 0.1)


# -- precision --------------------------------------------------------------------------------------


def trainer_of(
    parameters: Parameters, f: Functions, trained: list[Any], adapters: dict[str, Adapter] | None = None
) -> Trainer:
    decoder = TrainableDecoder(parameters, f, max_len=64, adapters=adapters)
    optimizer = AdamW(trained, f.ops, f.training, AdamWSettings())
    return Trainer(decoder, optimizer, micro_batch_tokens=100, max_gradient_norm=1.0)


def test_bfloat16_weights_have_masters_that_keep_small_steps(model: Path) -> None:
    """Steps far below bfloat16's resolution add up."""
    f = Functions.on(CPU)
    parameters = load_parameters(model, f.ops, bfloat16)
    trainer = trainer_of(parameters, f, list(parameters))
    before = parameters.variable(0, "down").value.numpy().astype(np.float32)
    for _ in range(12):
        trainer.step(examples(2), 1e-4)
    masters = dict(trainer.optimizer.tensors())["master/0.down.weight"].numpy()
    after = parameters.variable(0, "down").value.numpy()
    np.testing.assert_array_equal(after, masters.astype(bfloat16))
    assert np.abs(masters - before).mean() > 2e-4


# -- adapters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "phi3-partial-window"])
def test_an_adapter_learns_is_saved_loaded_and_merged(name: str, tmp_path: Path) -> None:
    folder = build(TINY_MODELS[name], tmp_path / "model")
    f = Functions.on(CPU)
    settings = LoraSettings(rank=3, alpha=6, rank_stabilised=name == "gpt2")
    parameters = load_parameters(folder, f.ops)
    before = {stored: tensor.numpy().copy() for stored, tensor in parameters.stored().items()}
    parameters.freeze()
    adapters = make_adapters(parameters, settings, CPU, seed=1)
    trainer = trainer_of(parameters, f, list(adapter_parameters(adapters)), adapters)
    start = trainer_of(parameters, f, list(parameters)).evaluate(examples())
    assert trainer.evaluate(examples()) == pytest.approx(start, rel=1e-6)  # B is 0
    for _ in range(8):
        trainer.step(examples(), 0.01)
    learnt = trainer.evaluate(examples())
    assert learnt < 0.95 * start
    for stored, tensor in parameters.stored().items():
        np.testing.assert_array_equal(tensor.numpy(), before[stored])

    save_adapter(tmp_path / "adapter", adapters, settings, "base")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 6)
    fresh = load_parameters(folder, f.ops)
    loaded, found = load_adapter(tmp_path / "adapter", fresh, CPU)
    assert found.factor == settings.factor
    assert trainer_of(fresh, f, list(fresh), loaded).evaluate(examples()) == learnt

    merge(fresh, loaded, f.ops)
    assert trainer_of(fresh, f, list(fresh)).evaluate(examples()) == pytest.approx(learnt, rel=1e-4)


def test_an_adapter_has_the_names_of_peft(model: Path, tmp_path: Path) -> None:
    f = Functions.on(CPU)
    parameters = load_parameters(model, f.ops)
    settings = LoraSettings(rank=2, targets=("q_proj", "down_proj"))
    save_adapter(tmp_path, make_adapters(parameters, settings, CPU, seed=1), settings, "base")
    tensors = load_tensors(tmp_path / "adapter_model.safetensors", CPU)
    config = TINY_MODELS["llama-tied-biases"].config
    layers = range(config["num_hidden_layers"])
    modules = [f"model.layers.{i}.{name}" for i in layers for name in ("self_attn.q_proj", "mlp.down_proj")]
    assert set(tensors) == {f"base_model.model.{name}.lora_{kind}.weight" for name in modules for kind in "AB"}
    a = tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"]
    assert a.shape == (2, config["intermediate_size"])


def test_adapters_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    f = Functions.on(CPU)
    parameters = load_parameters(model, f.ops)
    with pytest.raises(ConfigError, match=r"has no module c_attn for LoRA; it has down_proj, gate_proj, k_proj"):
        make_adapters(parameters, LoraSettings(targets=("c_attn",)), CPU, seed=1)
    with pytest.raises(ConfigError, match="from 1 to 256, not 0"):
        make_adapters(parameters, LoraSettings(rank=0), CPU, seed=1)
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        load_adapter(tmp_path, parameters, CPU)
    settings = LoraSettings(rank=2)
    save_adapter(tmp_path, make_adapters(parameters, settings, CPU, seed=1), settings, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for key, value, message in (
        ("use_dora", True, "use_dora"),
        ("r", 3, r"lora_A\.weight is of shape \[2, 64\]; the model makes it \[3, 64\]"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelError, match=message):
            load_adapter(tmp_path, parameters, CPU)


# -- the result -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_the_server_loads_a_trained_model(name: str, tmp_path: Path) -> None:
    """Its logits have the loss that the trainer measures."""
    base = build(TINY_MODELS[name], tmp_path / "base")
    f = Functions.on(CPU)
    parameters = load_parameters(base, f.ops)
    trainer = trainer_of(parameters, f, list(parameters))
    ids = np.array(prompt(), np.int32)
    for _ in range(3):
        trainer.step([Example(ids, np.ones(len(ids), np.float32))], 0.01)
    measured = trainer.evaluate([Example(ids, np.ones(len(ids), np.float32))])
    save_model(tmp_path / "tuned", base, parameters, f.ops, float32)
    max_len = TINY_MODELS[name].max_model_len
    logits = DecoderHarness.of(tmp_path / "tuned", make_ops(CPU), float32, max_model_len=max_len).logits(prompt())
    logits = logits.astype(np.float64)
    logs = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.append(ids[1:], 0)[:, None], 1)[:, 0]
    assert measured == pytest.approx(float(logs[:-1].mean()), rel=1e-4)


def test_tensors_survive_a_file(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(3, bfloat16),
        "c": np.zeros((0, 2), np.int32),
    }
    save_tensors(tmp_path / "x.safetensors", {name: from_numpy(array, CPU) for name, array in arrays.items()})
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    for name, tensor in load_tensors(tmp_path / "x.safetensors", CPU).items():
        assert tensor.dtype == arrays[name].dtype
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])


def test_a_share_of_the_device_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 ms that the device is busy, a quarter of the time, 90 ms follow in which it is not."""
    clock = SimpleNamespace(now=0.0, slept=[])
    timing = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.slept.append)
    monkeypatch.setattr("tessera.engine.training.device_share.time", timing)

    def synchronize() -> None:
        clock.now += 0.03 - INTERVAL

    share = DeviceShare(cast(Device, SimpleNamespace(synchronize=synchronize)), 0.25)
    share()
    assert clock.slept == []
    clock.now += INTERVAL
    share()
    assert clock.slept == [pytest.approx(0.09)]


def test_each_operation_and_each_backward_keeps_the_pace() -> None:
    f = Functions.on(CPU)
    calls: list[int] = []
    f.pace = lambda: calls.append(1)
    x = f.variable(np.ones((1, 2), np.float32))
    loss = f.sum(f.mul(x, x))
    assert len(calls) == 2
    f.backward(loss)
    assert len(calls) == 4
