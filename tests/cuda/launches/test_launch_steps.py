"""Whole steps of real architectures on a device that only writes down what it would launch.

Nothing is computed; but every kernel must have been compiled ahead and fit the device, every tensor must lie in memory
that is allocated, and what a step needs must be there before the first one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.formats import Int8RowsFormat, LinearWeight, WeightPart
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.weights.dummy import dummy_weights
from tessera.engine.models.weights.weights import LayerWeights, Weights
from tessera.engine.ops.cuda import CudaOps, linear
from tessera.engine.ops.cuda.attention import sm90_prefill
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.runner.model_runner import ModelRunner
from tests.bench.models import write_model
from tests.cuda.launches.steps import BLOCKS_PER_SEQ, MAX_MODEL_LEN, MAX_NUM_SEQS, StepDevice, batch_of, launches_of
from tests.support.paths import BUILTIN


def int8_weights(config: ModelConfig, dtype: Any, ops: Any, **settings: Any) -> Weights:
    """Every matrix in int8 rows; nothing is in them."""
    dense = dummy_weights(config, dtype, ops, **settings)

    def stored(weight: LinearWeight) -> LinearWeight:
        return LinearWeight((WeightPart.empty(Int8RowsFormat(), *weight.shape, ops.device),), weight.bias)

    layers = tuple(
        LayerWeights(
            replace(layer.attention, qkv=stored(layer.attention.qkv), out=stored(layer.attention.out)),
            replace(layer.mlp, up=stored(layer.mlp.up), down=stored(layer.mlp.down)),
        )
        for layer in dense.layers
    )
    table = stored(dense.embedding)
    return replace(dense, layers=layers, embedding=table, lm_head=table)


MODELS = ["qwen3-0.6b", "llama-8b", "llama-8b in order", "gemma-3-4b", "builtin", "builtin-int8"]


@pytest.fixture(scope="module", autouse=True)
def maps_without_a_driver() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "box_map", lambda matrix, rows: bytes(128))
        patch.setattr(sm90_prefill, "row_groups_map", lambda *description: bytes(128))
        yield


@pytest.fixture(scope="module", params=MODELS)
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, maps_without_a_driver: None
) -> ModelRunner:
    built = request.param.startswith("builtin")
    name, _, in_order = request.param.partition(" ")
    folder = BUILTIN if built else write_model(tmp_path_factory.mktemp("models"), name)
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        num_kv_blocks=MAX_NUM_SEQS * BLOCKS_PER_SEQ,
        dtype="bfloat16",
        batch_invariant=bool(in_order),
    )
    device: Any = StepDevice()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "builtin-int8":
            patch.setattr("tessera.engine.runner.model_runner.dummy_weights", int8_weights)
        made = ModelRunner(config, load_config(folder), device, CudaOps(device, batch_invariant=bool(in_order)))
    device.is_serving = True
    return made


@pytest.mark.parametrize(
    ("counts", "contexts", "is_recorded"),
    [
        ([1], [7], True),
        ([1] * 16, [400] * 16, True),
        ([1] * MAX_NUM_SEQS, [1900] * MAX_NUM_SEQS, True),
        ([5], [0], True),
        ([1] * 12 + [4], [300] * 13, True),
        ([1] * 24 + [8], [300] * 25, True),
        ([1] * (MAX_NUM_SEQS - 1) + [200], [300] * MAX_NUM_SEQS, True),
        ([180, *[1] * 16], [1500, *[300] * 16], True),
        ([2000], [0], True),
        ([1500] * 4, [0] * 4, False),
    ],
    ids=str,
)
def test_a_step(runner: ModelRunner, counts: list[int], contexts: list[int], is_recorded: bool) -> None:
    batch = batch_of(counts, contexts)
    assert (runner._graphs.find(batch) is not None) == is_recorded
    launches = launches_of(runner, batch)
    names = {launch.spec.name for launch in launches}
    assert "sample_cluster_kernel" in names
    stored = runner.decoder.weights.embedding.dense is None
    assert {"dequantize_int8_rows_kernel" if stored else "embedding_kernel"} <= names
    assert stored or "scale_kernel" not in names, "rows of the table are scaled where they are looked up"


def test_of_the_last_layer_a_prompts_tokens_have_keys_and_values_alone(runner: ModelRunner) -> None:
    products = {spec.name for spec in linear.SPECS}

    def rows_of_products(batch: StepBatch) -> list[int]:
        found = []
        for launch in launches_of(runner, batch):
            if launch.spec.name in products:
                found.append(launch.params.num_rows)
        return found

    prompts = rows_of_products(batch_of([1500] * 4, [0] * 4))
    layers = runner.model.num_layers
    assert prompts == [6000] * (4 * (layers - 1) + 1) + [4] * 4, "out, up and down of the last layer, and the head"
    assert rows_of_products(batch_of([1] * 4, [9] * 4)) == [4] * (4 * layers + 1)


@pytest.mark.parametrize("num_rows", [1, 2, 16])
def test_norms_and_gates_of_a_few_rows_are_parts_of_products(runner: ModelRunner, num_rows: int) -> None:
    """But for those that Gemma 3 has behind its halves, with several rows and at the end."""
    ops: Any = runner.decoder.ops
    if runner.decoder.weights.embedding.dense is None or ops.batch_invariant:
        pytest.skip("int8 weights and products in order are for other kernels")
    halves = [half for layer in runner.model.layers for half in (layer.attention, layer.mlp)]
    after = sum(half.norms.after is not None for half in halves)
    names = Counter(launch.spec.name for launch in launches_of(runner, batch_of([1] * num_rows, [400] * num_rows)))
    assert names["rmsnorm_add_kernel"] == (min(after, 1) if num_rows == 1 else after)
    assert names["matmul_decode_kernel"] == 4 * runner.model.num_layers + 1
    assert not names.keys() & {"rmsnorm_kernel", "gelu_mul_kernel", "silu_mul_kernel"}
