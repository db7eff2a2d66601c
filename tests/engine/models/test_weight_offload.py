"""Layers in host memory: the same numbers, bit for bit, in any format; what cannot be had is said and left out."""

from __future__ import annotations

import dataclasses
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.messages import AddRequest, EngineInfo
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tessera.engine.models.config import load_config
from tessera.engine.models.offload import host_layers as host_layers_module
from tessera.engine.models.offload.choice import layers_beyond, layers_within, spread
from tessera.engine.models.offload.copies import ArrayCopies, Bytes
from tessera.engine.models.offload.host_layers import HostLayers
from tessera.engine.models.weights.build import layer_bytes
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.memory import weight_offload
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, Tensor, float32
from tests.engine.gguf.converter import write_converted
from tests.support.cases.quantisers import SCHEMES, quantised_model
from tests.support.decoder_harness import DecoderHarness
from tests.support.models.tiny_encoder import build_encoder
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, TinyModel, build, prompt

CLIENT = b"client"
NUM_LAYERS = 7


def deep(model: TinyModel, num_layers: int = NUM_LAYERS) -> TinyModel:
    name = "n_layer" if "n_layer" in model.config else "num_hidden_layers"
    return dataclasses.replace(model, config={**model.config, name: num_layers})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(deep(TINY_MODELS["llama"]), tmp_path_factory.mktemp("llama"))


def host_layers(*layers: int) -> HostLayers:
    return HostLayers(CPU, lambda first: layers, lambda slots: ArrayCopies(CPU, slots))


def load(path: Path, taker: HostLayers | None) -> Weights:
    return load_weights(path, load_config(path), float32, make_ops(CPU), host_layers=taker)


def logits(path: Path, taker: HostLayers | None) -> Any:
    """Of a prompt in three steps."""
    weights = load(path, taker)
    made = DecoderHarness(load_config(path), weights, make_ops(CPU), float32, max_model_len=64)
    tokens = prompt()
    return made.logits(tokens, [len(tokens) - 3, 1, 2])


# -- the choice of layers -------------------------------------------------------------------------


def test_layers_are_spread_evenly_and_the_last_is_among_them() -> None:
    for num_layers in range(1, 90):
        for count in range(1, num_layers + 1):
            found = spread(count, num_layers)
            assert len(set(found)) == count
            assert found[-1] == num_layers - 1
            gaps = np.diff([-1, *found])
            assert gaps.max() - gaps.min() <= 1


def test_as_many_layers_as_the_size_holds() -> None:
    assert layers_within(0, [10] * 8) == ()
    assert layers_within(45, [10] * 8) == spread(4, 8)
    assert layers_within(1000, [10] * 8) == tuple(range(8))
    assert layers_within(25, [1, *[10] * 7]) == (3, 7), "the sizes of the layers chosen count"


def test_as_few_layers_as_make_the_others_fit() -> None:
    """70 B in 16 bits on a card with 127 GB for 137 GB of layers: two layers more than those that do not fit."""
    layer, room = 1_711_308_800, 127 * 10**9
    chosen = layers_beyond(room, [layer] * 80)
    assert len(chosen) == -(-(80 * layer - room) // layer) + 2
    assert layers_beyond(80 * layer, [layer] * 80) == ()
    assert layers_beyond(0, [layer] * 80) == tuple(range(80))


# -- numbers --------------------------------------------------------------------------------------

FORMATS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda path: build(deep(TINY_MODELS["llama"], 3), path),
    "gpt2": lambda path: build(TINY_MODELS["gpt2"], path),
    "experts in MXFP4": lambda path: build(deep(TINY_MODELS["gptoss-mxfp4"], 3), path),
    "GGUF": lambda path: write_converted(path.with_suffix(".gguf"), TINY_MODELS["llama"]),
    **{
        name: lambda path, name=name: quantised_model(path, SCHEMES[name])[0]  # type: ignore[misc]
        for name in ("gptq-actorder", "fp8-tensor", "nf4")
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_format_has_the_same_logits(name: str, tmp_path: Path) -> None:
    path = FORMATS[name](tmp_path / "model")
    weights = load(path, host_layers(0, 1, 2))
    assert weights.stream is not None
    assert weights.nbytes == load(path, None).nbytes
    assert np.array_equal(logits(path, host_layers(0, 1, 2)), logits(path, None))


@pytest.mark.parametrize("chosen", [(6,), (0, 6), (1, 3, 6), (0, 1, 2, 3, 5), tuple(range(7))])
def test_any_choice_of_layers_has_the_same_logits(folder: Path, chosen: tuple[int, ...]) -> None:
    assert np.array_equal(logits(folder, host_layers(*chosen)), logits(folder, None))


class OrderCopies(ArrayCopies):
    """Copies that happen as late as they may: when the step must wait for them."""

    def __init__(self, slots: Sequence[Tensor]) -> None:
        super().__init__(CPU, slots)
        self.submitted: dict[int, list[Bytes]] = {}

    def fetch(self, source: Bytes, slot: int) -> None:
        self.submitted.setdefault(slot, []).append(source)

    def hold_step(self, slot: int) -> None:
        (source,) = self.submitted.pop(slot)  # one copy at a time is under way into a slot
        super().fetch(source, slot)


def test_copies_may_end_as_late_as_their_layers_begin(folder: Path) -> None:
    made: list[OrderCopies] = []

    def make_copies(slots: Sequence[Tensor]) -> OrderCopies:
        made.append(OrderCopies(slots))
        return made[-1]

    found = logits(folder, HostLayers(CPU, lambda first: (1, 2, 4, 6), make_copies))
    assert np.array_equal(found, logits(folder, None))
    assert not made[0].submitted, "a CUDA graph cannot end with a copy that no kernel waits for"


def test_layers_that_share_a_slot_share_its_memory(folder: Path) -> None:
    weights = load(folder, host_layers(1, 3, 5, 6))
    one, other, third = (weights.layers[index].attention.qkv.parts[0].tensors["values"] for index in (1, 3, 5))
    assert one.pointer == third.pointer
    assert one.pointer != other.pointer


# -- the option -----------------------------------------------------------------------------------


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """A GiB is the size of a layer, which is returned."""
    size = layer_bytes(load_config(folder), float32)[0]
    size = -(-size // 256) * 256 + 4096
    monkeypatch.setattr(weight_offload, "GIB", size)
    return size


def serve(folder: Path, *, num_requests: int = 4, **settings: Any) -> tuple[list[list[int]], EngineInfo]:
    """The tokens of a few requests at once."""
    config = EngineConfig(model=str(folder), device="cpu", num_kv_blocks=40, max_model_len=64, **settings)
    engine = load_engine(config, lambda stage, done, total: None)
    core = engine.core
    assert isinstance(core, EngineCore)
    rng = np.random.default_rng(2)
    found: dict[str, list[int]] = {}
    for number in range(num_requests):
        params = SamplingParams(max_tokens=6, temperature=0.8, seed=number, ignore_eos=True)
        tokens = array("i", rng.integers(3, VOCAB_SIZE, 20).tolist())
        core.add_request(AddRequest(str(number), tokens, params, time.monotonic()), CLIENT)
        found[str(number)] = []
    while core.has_work:
        for output in core.step().get(CLIENT, []):
            assert output.error is None
            found[output.request_id] += output.token_ids
    return list(found.values()), engine.info


def test_an_engine_gives_the_same_tokens(folder: Path, small_units: int) -> None:
    expected, info = serve(folder)
    assert info.weight_offload is None
    found, info = serve(folder, cpu_offload_gib="5")
    assert found == expected
    offload = info.weight_offload
    assert offload is not None
    assert (offload.num_layers, offload.num_all_layers) == (5, NUM_LAYERS)
    assert 0 < offload.nbytes <= 5 * small_units
    assert offload.copy_seconds > 0


def test_beside_weights_that_come_from_the_host_nothing_counts(folder: Path, small_units: int) -> None:
    model, ops = load_config(folder), make_ops(CPU)
    configs = [EngineConfig(model=str(folder), num_kv_blocks=40, cpu_offload_gib=size) for size in ("0", "5")]
    of_device, of_host = (ModelRunner(config, model, CPU, ops) for config in configs)
    assert of_device.decode_reads.cached_token > 0
    assert of_host.decode_reads.of(8, 10_000) == 1, "shares are of weights on the device, which are read far sooner"


@pytest.mark.parametrize("value", ["0", "auto"])
def test_nothing_is_kept_where_that_is_asked_for_or_there_is_no_device_to_relieve(folder: Path, value: str) -> None:
    assert serve(folder, num_requests=0, cpu_offload_gib=value)[1].weight_offload is None


def test_an_engine_without_memory_to_pin_goes_on(
    folder: Path, small_units: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = serve(folder)
    left = iter([2**40] * 3 + [0] * 9)
    monkeypatch.setattr(host_layers_module, "available_memory", lambda: next(left))
    with caplog.at_level(logging.WARNING):
        found, info = serve(folder, cpu_offload_gib="6")
    assert found == expected
    assert info.weight_offload is not None
    assert info.weight_offload.num_layers == 3
    (record,) = [each for each in caplog.records if "host memory" in each.getMessage()]
    assert "3 of 6 layers are kept in host memory" in record.getMessage()


def test_more_than_the_machine_has_is_not_begun(
    folder: Path, small_units: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_offload, "available_memory", lambda: 4 * small_units)
    with caplog.at_level(logging.WARNING):
        _, info = serve(folder, cpu_offload_gib="6")
    assert info.weight_offload is not None
    assert info.weight_offload.num_layers == 4
    assert "4 layers are kept in host memory, not 6: only" in caplog.text


def test_sizes_that_free_nothing_are_refused(folder: Path, small_units: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--cpu-offload-gib 2 holds 2 of this model's layers, .*: pass [23]"):
        serve(folder, cpu_offload_gib="2")
    short = build(deep(TINY_MODELS["llama"], 2), tmp_path / "short")
    with pytest.raises(ConfigError, match="--cpu-offload-gib needs a model of at least 3 layers; this one has 2"):
        serve(short, cpu_offload_gib="2")
    with pytest.raises(ConfigError, match=r"--cpu-offload-gib is for decoders, but .* is an encoder"):
        load_engine(
            EngineConfig(model=str(build_encoder(tmp_path / "encoder")), device="cpu", cpu_offload_gib="2"),
            lambda stage, done, total: None,
        )


@pytest.mark.parametrize("value", ["-1", "all", "1e3", ""])
def test_a_wrong_size_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="--cpu-offload-gib must be a size in GiB or auto, not"):
        EngineConfig(model="m", cpu_offload_gib=value).verify()
