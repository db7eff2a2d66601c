"""Whole steps of real architectures on a device that only writes down what it would launch.

Nothing is computed; but every kernel must have been compiled ahead and fit the device, every tensor must lie in memory
that is allocated, and what a step needs must be there before the first one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.step_batch import StepBatch
from tessera.engine.cuda.kernel import KernelSpec, LaunchConfig, P
from tessera.engine.formats import Int8RowsFormat, LinearWeight, WeightPart
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.weights.dummy import dummy_weights
from tessera.engine.models.weights.weights import LayerWeights, Weights
from tessera.engine.ops.cuda import CudaOps, linear
from tessera.engine.ops.cuda.attention import sm90_prefill
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, Buffer, Device, HostMemory, Mark, Tensor
from tests.bench.models import write_model
from tests.cuda.test_launch_attention import Launch, check_launch
from tests.cuda.test_launch_sm90_matmul import H200, SHARED_BYTES
from tests.support.decoder_harness import Row, step_batch
from tests.support.paths import BUILTIN

BLOCK_SIZE = 16
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 2048
BLOCKS_PER_SEQ = MAX_MODEL_LEN // BLOCK_SIZE


class Written:
    """A recording: its launches, written down again with each replay."""

    def __init__(self, device: StepDevice) -> None:
        self.device = device
        self.launches: list[Launch] = []

    def launch(self) -> None:
        self.device.launches += self.launches


class StepDevice(Device):
    """Memory is addresses; what is read from it is 0."""

    name = "cuda:0"
    device_name = "written"
    asynchronous = True
    is_capturing = is_serving = False
    arch, compute_capability, multiprocessors = "90a", (9, 0), H200[0]
    max_shared_bytes = SHARED_BYTES

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.allocated: list[int] = []
        self.compiled: set[tuple[KernelSpec[Any], tuple[str, ...]]] = set()
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._next = 1 << 30

    def allocate(self, nbytes: int) -> Buffer:
        self.allocated.append(nbytes)
        begin, self._next = self._next, self._next + -(-max(nbytes, 1) // 512) * 512
        self._begins.append(begin)
        self._ends.append(begin + nbytes)
        return Buffer(self, begin, nbytes, None)

    def check(self, tensor: Tensor) -> None:
        index = bisect_right(self._begins, tensor.pointer) - 1
        assert index >= 0, f"{tensor} is nowhere"
        assert tensor.pointer + tensor.nbytes <= self._ends[index], f"{tensor} reaches beyond its memory"

    def pinned(self, nbytes: int) -> HostMemory:
        return CPU.pinned(nbytes)

    def event(self) -> Mark:
        return CPU.event()

    def upload(self, pointer: int, array: np.ndarray[Any, Any]) -> None: ...
    def upload_async(self, pointer: int, array: np.ndarray[Any, Any]) -> None: ...
    def copy(self, destination: int, source: int, nbytes: int) -> None: ...
    def fill_bytes(self, pointer: int, value: int, nbytes: int) -> None: ...
    def synchronize(self) -> None: ...

    def download(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        array[...] = 0

    def download_async(self, array: np.ndarray[Any, Any], pointer: int) -> None:
        array[...] = 0

    def clusters_at_once(self, spec: KernelSpec[Any], template: tuple[str, ...], config: LaunchConfig) -> int:
        return H200[config.cluster - 1]

    def compile(self, pairs: Sequence[tuple[KernelSpec[Any], tuple[str, ...]]], progress: Any = None) -> None:
        self.compiled.update(pairs)

    def launch(self, spec: KernelSpec[P], template: tuple[str, ...], config: LaunchConfig, params: P) -> None:
        launch = Launch(spec, template, config, params)
        if not self.is_serving and not self.is_capturing:
            self.compiled.add((spec, template))  # by the warm-up
        check_launch(launch, self.compiled, self.max_shared_bytes)
        assert spec.supports(self.arch)
        for value in params:
            if isinstance(value, Tensor):
                self.check(value)
        self.launches.append(launch)

    @contextmanager
    def capture(self) -> Iterator[Callable[[], Written]]:
        before, written = self.launches, Written(self)
        self.launches, self.is_capturing = written.launches, True
        yield lambda: written
        self.launches, self.is_capturing = before, False


@pytest.fixture(scope="module", autouse=True)
def maps_without_a_driver() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sm90, "box_map", lambda matrix, rows: bytes(128))
        patch.setattr(sm90_prefill, "row_groups_map", lambda *description: bytes(128))
        yield


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


def batch_of(counts: list[int], contexts: list[int]) -> StepBatch:
    """Rows of `counts` new tokens after `contexts`; decodes and the ends of prompts."""
    params = SamplingParams(max_tokens=8, temperature=0.0)
    rows = []
    for slot, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        blocks = list(range(slot * BLOCKS_PER_SEQ, (slot + 1) * BLOCKS_PER_SEQ))
        rows.append(Row(slot, blocks, [5] * (context + count), params, num_computed=context))
    return step_batch(rows, BLOCK_SIZE)


def launches_of(runner: ModelRunner, batch: StepBatch) -> list[Launch]:
    device: Any = runner.device
    device.launches.clear()
    device.allocated.clear()
    runner.start(batch).result()
    assert device.allocated == [], "a step allocates nothing"
    return list(device.launches)


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
