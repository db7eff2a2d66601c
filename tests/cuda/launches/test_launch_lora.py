"""What steps with adapters launch, on a device that only writes launches down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.adapters.reader import read_adapter
from tessera.engine.contract.config import EngineConfig
from tessera.engine.models.config import load_config
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention import sm90_prefill
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.sm90_kernels import SM90_MATMUL
from tessera.engine.ops.cuda.lora import choices, product
from tessera.engine.ops.cuda.lora.expand import expand_config
from tessera.engine.ops.cuda.lora.shapes import expand_shape
from tessera.engine.ops.cuda.lora.shrink import shrink_config
from tessera.engine.runner.model_runner import ModelRunner
from tests.cuda.launches.steps import StepDevice, batch_of, launches_of
from tests.support.models.tiny_adapters import TinyAdapter
from tests.support.paths import BUILTIN

OWN = "sm90_adapted_matmul_kernel"
LORA = ("group_rows_kernel", "lora_shrink_norm_kernel", "lora_shrink_kernel", "lora_expand_kernel")


def make_runner(max_lora_rank: int, rows: int = 16, *, enforce_eager: bool = False) -> ModelRunner:
    config = EngineConfig(
        model=str(BUILTIN),
        load_format="dummy",
        max_num_seqs=rows,
        num_kv_blocks=128 * rows,
        dtype="bfloat16",
        max_loras=4,
        enforce_eager=enforce_eager,
    )
    device: Any = StepDevice()
    made = ModelRunner(config, load_config(BUILTIN), device, CudaOps(device), max_lora_rank=max_lora_rank)
    device.is_serving = True
    return made


@pytest.fixture(scope="module", autouse=True)
def maps_without_a_driver() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (sm90, product):
            patch.setattr(module, "box_map", lambda matrix, rows: bytes(128))
        patch.setattr(product, "as_lines_map", lambda values, lines: bytes(128))
        patch.setattr(sm90_prefill, "row_groups_map", lambda *description: bytes(128))
        yield


@pytest.fixture(scope="module")
def runners(maps_without_a_driver: None) -> tuple[ModelRunner, ModelRunner]:
    """Without slots for adapters, and with them."""
    return make_runner(0), make_runner(16)


STEPS = [([1], [7]), ([1] * 12, [40] * 12), ([5], [0]), ([90, 1, 1], [0, 30, 30])]


@pytest.mark.parametrize(("counts", "contexts"), STEPS, ids=str)
def test_a_step_without_adapters_launches_what_it_always_did(
    runners: tuple[ModelRunner, ModelRunner], counts: list[int], contexts: list[int]
) -> None:
    batch = batch_of(counts, contexts)
    plain, adapted = (
        [(launch.spec.name, launch.template, launch.config) for launch in launches_of(runner, batch)]
        for runner in runners
    )
    assert plain == adapted


@pytest.mark.parametrize(("counts", "contexts"), STEPS, ids=str)
def test_a_step_with_adapters_is_a_graph_of_few_kernels_a_product(
    runners: tuple[ModelRunner, ModelRunner], counts: list[int], contexts: list[int]
) -> None:
    runner = runners[1]
    batch = batch_of(counts, contexts)
    slots = np.arange(len(counts), dtype=np.int32) % 4 - 1
    slots[0] = 2
    batch.adapter_slots = np.repeat(slots, counts)
    assert runner._adapted_graphs.find(batch) is not None
    names = Counter(launch.spec.name for launch in launches_of(runner, batch))
    layers = runner.model.num_layers
    is_decode = max(counts) == 1
    assert [names[name] for name in LORA] == [1 if is_decode else 2, 2 * layers, layers, 4 * layers]
    assert not names["silu_mul_kernel"], "the kernel that adds adapters does it"
    assert names["rmsnorm_kernel"] <= 1, "norms in front of products are beside those with A"


def test_the_product_with_a_is_in_front_of_the_base(runners: tuple[ModelRunner, ModelRunner]) -> None:
    """It hides behind the weights that the next kernel fetches before it waits; that with B follows the product."""
    batch = batch_of([1] * 12, [40] * 12)
    batch.adapter_slots = np.arange(12, dtype=np.int32) % 4
    names = [launch.spec.name for launch in launches_of(runners[1], batch)]
    shrinks, expands = ([i for i, name in enumerate(names) if kernel in name] for kernel in ("lora_shrink", LORA[3]))
    befores = sorted([*shrinks, *expands[2::4]])  # activations are multiplied with the next A where they are made
    for before, expand in zip(befores, expands, strict=True):
        between = names[before + 1 : expand]
        assert between
        assert all("matmul" in name or "linear" in name for name in between), between


@pytest.mark.parametrize("fuses_gates", [True, False])
def test_products_of_64_rows_add_their_adapters(
    fuses_gates: bool, maps_without_a_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch for a product's adapters, none behind it; with the plan of the product without them."""
    monkeypatch.setattr(choices, "FUSES_PRODUCTS", True)
    monkeypatch.setattr(choices, "FUSES_GATES", fuses_gates)
    plain, adapted = (make_runner(rank, 64, enforce_eager=True) for rank in (0, 16))
    batch = batch_of([1] * 64, [40] * 64)
    products = [launch for launch in launches_of(plain, batch) if launch.spec is SM90_MATMUL]
    batch.adapter_slots = np.arange(64, dtype=np.int32) % 4
    launches = launches_of(adapted, batch)
    layer = ["lora_shrink_norm_kernel", OWN, "lora_shrink_kernel", OWN, "lora_shrink_norm_kernel"]
    layer += [OWN, "lora_shrink_kernel", OWN] if fuses_gates else ["sm90_matmul_kernel", "lora_expand_kernel", OWN]
    names = [name for name in [launch.spec.name for launch in launches] if name in {*layer}]
    assert names[: 2 * len(layer)] == 2 * layer
    own = [launch for launch in launches if launch.spec.name == OWN]
    if fuses_gates:
        alike = [(launch.config, launch.params.splits, launch.params.stages) for launch in own]
        assert alike[:4] == [(launch.config, launch.params.splits, launch.params.stages) for launch in products[:4]]


def test_few_rows_have_a_block_for_each_slice_of_the_width() -> None:
    """64 rows over 16 adapters of rank 16, and a long prompt; without room for their sums blocks take all slices."""
    room = 64 * 3 * 16 * 14
    down = partial(shrink_config, num_slots=16, parts=1, max_rank=16, width=14336, multiprocessors=132)
    assert down(64, room=room).grid == (20, 1, 14)
    assert down(64, room=64 * 16).grid == (20, 1, 1)
    assert down(8192, room=1 << 30).grid == (528, 1, 1)
    assert shrink_config(64, 16, 3, 16, 4096, room, 132).grid == (20, 3, 4)


@pytest.mark.parametrize(("max_rank", "features"), [(8, 256), (16, 512), (24, 256), (256, 256)])
def test_blocks_have_features_of_one_part(max_rank: int, features: int) -> None:
    shape = expand_shape(max_rank)
    assert shape.features(gated=False) == features
    assert shape.features(gated=True) == features // 2
    apart = expand_config(64, 16, (4096, 1024, 1000), shape, gated=False)
    assert apart.grid == (6 * 1024 // features, 20, 1)
    assert expand_config(64, 16, (14336, 14336), shape, gated=True).grid == (2 * 14336 // features, 24, 1)


def test_an_adapter_is_put_into_its_slot(runners: tuple[ModelRunner, ModelRunner], tmp_path: Path) -> None:
    runner, uploads = runners[1], []
    hidden = runner.model.hidden_size
    folder = TinyAdapter({"model.layers.0.mlp.gate_proj": (hidden, runner.model.layers[0].mlp.inner_size)}, 1)
    adapter = read_adapter(folder.write(tmp_path), runner.model, max_rank=16)
    device: Any = runner.device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "upload", lambda pointer, array: uploads.append(array.nbytes))
        batch = batch_of([1], [7])
        batch.adapter_slots, batch.adapter_loads = np.zeros(1, np.int32), [(0, adapter)]
        launches_of(runner, batch)
    assert runner._adapter_slots is not None
    of_slots = runner._adapter_slots.nbytes - runner._adapter_slots.selection.shrunk.nbytes
    assert sum(uploads) == of_slots // 4 + 4, "all of a slot, and its rank"
