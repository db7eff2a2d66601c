"""Adapters between host memory and the slots of the device, and the sequences that wait for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tessera.engine.adapters.catalog import AdapterCatalog, ServedAdapter
from tessera.engine.adapters.make import make_catalog
from tessera.engine.adapters.reader import Adapter
from tessera.engine.adapters.seats import AdapterSeats
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError, InvalidRequestError, NotFoundError
from tessera.engine.models.config import load_config
from tessera.engine.tensor import CPU
from tests.support.models.tiny_adapters import TinyAdapter
from tests.support.models.tiny_models import TINY_MODELS, build


@dataclass(eq=False)
class Waiting:
    adapter: ServedAdapter | None
    adapter_slot: int = -1


@pytest.fixture
def catalog(tmp_path: Path) -> AdapterCatalog:
    """Of a, b, c and d, of which two are in host memory."""
    model = load_config(build(TINY_MODELS["llama"], tmp_path / "model"))
    catalog = AdapterCatalog(model, max_rank=4, max_in_memory=2)
    for seed, name in enumerate("abcd"):
        folder = TinyAdapter({"model.layers.0.self_attn.q_proj": (64, 64)}, seed).write(tmp_path / name)
        catalog.register(name, folder, catalog.read(folder).result())
    return catalog


def run(seats: AdapterSeats, name: str) -> Waiting:
    """A sequence that is in the next step, once its adapter has been read."""
    sequence = Waiting(seats.catalog.find(name))
    seats.begin_pass()
    if not seats.can_run(sequence):
        seats.catalog.wait(10)
        assert not seats.catalog.finish_reads()
        assert seats.can_run(sequence)
    seats.take(sequence)
    return sequence


def loads(seats: AdapterSeats) -> list[tuple[int, Adapter]]:
    return seats.take_loads()


def test_the_slot_unused_for_longest_is_taken(catalog: AdapterCatalog) -> None:
    seats = AdapterSeats(catalog, 2)
    first, second = run(seats, "a"), run(seats, "b")
    assert [slot for slot, _ in loads(seats)] == [first.adapter_slot, second.adapter_slot] == [0, 1]
    seats.give_back(second)
    seats.give_back(first)
    third = run(seats, "c")  # in the place of b, which ended first
    assert (third.adapter_slot, len(loads(seats))) == (1, 1)
    again = run(seats, "a")
    assert (again.adapter_slot, loads(seats)) == (0, [])
    assert catalog.num_in_memory == 2


def test_a_sequence_without_a_slot_lets_others_pass_but_not_for_ever(catalog: AdapterCatalog) -> None:
    seats = AdapterSeats(catalog, 2)
    for name in "aab":
        run(seats, name)
    seats.begin_pass()
    assert seats.can_run(Waiting(None))
    assert not seats.can_run(Waiting(catalog.find("c")))
    assert seats.can_run(Waiting(catalog.find("a")))
    assert not seats.can_run(Waiting(catalog.find("b"))), "the fewest sequences run with it, so its slot comes free"
    seats.begin_pass()
    assert seats.can_run(Waiting(catalog.find("b"))), "one that is further ahead still may"


def test_names_are_unique_and_what_has_begun_goes_on(catalog: AdapterCatalog) -> None:
    seats = AdapterSeats(catalog, 2)
    begun, folder = Waiting(catalog.find("d")), catalog.find("a").folder
    with pytest.raises(InvalidRequestError, match="'d' is loaded already"):
        catalog.register("d", folder, catalog.read(folder).result())
    catalog.register("d", folder, catalog.read(folder).result(), replace=True)
    assert catalog.find("d") is not begun.adapter
    catalog.remove("d")
    with pytest.raises(NotFoundError, match="The model 'd' does not exist here"):
        catalog.find("d")
    with pytest.raises(NotFoundError, match="There is no adapter 'd'"):
        catalog.remove("d")
    assert seats.can_run(begun)


def test_a_folder_that_has_changed_is_not_read_again(catalog: AdapterCatalog) -> None:
    served = catalog.find("a")  # not in host memory any more
    TinyAdapter({"model.layers.0.self_attn.q_proj": (64, 64)}, seed=9).write(served.folder)
    assert catalog.in_memory(served) is None
    catalog.wait(10)
    failed = catalog.finish_reads()
    assert "has changed since it was loaded; load it again" in failed[served].message
    assert not catalog.is_reading


def test_servers_that_cannot_have_adapters_say_so(tmp_path: Path) -> None:
    llama = load_config(build(TINY_MODELS["llama"], tmp_path / "model"))
    assert make_catalog(EngineConfig(model="m"), llama, CPU) == (None, 0)
    made, max_rank = make_catalog(EngineConfig(model="m", allow_lora_loading=True), llama, CPU)
    assert made is not None
    assert (list(made), max_rank) == ([], 16)
    folder = TinyAdapter({"model.layers.0.self_attn.q_proj": (64, 64)}, 1, rank=33).write(tmp_path / "adapter")
    made, max_rank = make_catalog(EngineConfig(model="m", lora=(f"one={folder}",)), llama, CPU)
    assert made is not None
    assert ([each.name for each in made], max_rank) == (["one"], 33)
    with pytest.raises(ConfigError, match=r"--lora one: there is no folder /absent"):
        make_catalog(EngineConfig(model="m", lora=("one=/absent",), max_lora_rank=8), llama, CPU)
    with pytest.raises(ConfigError, match="are for models that generate text"):
        make_catalog(EngineConfig(model="m", allow_lora_loading=True), replace(llama, is_encoder=True), CPU)
    with pytest.raises(ConfigError, match="cannot be used with --batch-invariant"):
        EngineConfig(model="m", allow_lora_loading=True, batch_invariant=True).verify()
