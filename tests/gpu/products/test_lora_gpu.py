"""Adapters beside products on the GPU against the CPU; names with `small` also run in the emulation within minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.adapters.reader import read_adapter
from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.formats import Int8RowsFormat, LinearWeight, WeightPart
from tessera.engine.models.config import load_config
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.lora.expand import can_take_begun, launch_expand_silu_mul
from tessera.engine.ops.cuda.lora.groups import TILE_INTS, num_tiles
from tessera.engine.ops.cuda.lora.shrink import num_slices
from tessera.engine.ops.interface import Ops
from tessera.engine.ops.linear_interface import Accumulate, Activate, Epilogue, Prologue, RMSNorm
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, bfloat16, empty, float16, float32, from_numpy
from tests.gpu.products.adapters import Array, rows_of, stack_of
from tests.support.cases.op_cases import poisoned, random_array
from tests.support.decoder_harness import Row, relative_error, scattered_blocks, step_batch
from tests.support.models.tiny_adapters import TinyAdapter
from tests.support.models.tiny_models import TINY_MODELS, build, prompt
from tests.support.references.reference import assert_close

pytestmark = pytest.mark.gpu

DTYPES = [float32, float16, bfloat16]


@pytest.mark.parametrize(("num_rows", "num_slots"), [(1, 1), (37, 3), (70, 16), (2100, 300)])
def test_rows_are_grouped_by_slot_small(num_rows: int, num_slots: int, cuda_ops: CudaOps) -> None:
    slots = np.random.default_rng(num_rows).integers(-1, num_slots, num_rows)
    rows = rows_of(cuda_ops, slots, num_slots)
    assert rows.groups is not None
    groups = rows.groups.numpy()
    tiles = groups[num_rows:].reshape(num_tiles(num_rows, num_slots), TILE_INTS)
    found = {}
    for slot, begin, count in tiles.tolist():
        assert 0 <= count <= 16
        for row in groups[begin : begin + count].tolist():
            assert row not in found
            found[row] = slot
    assert found == {row: slot for row, slot in enumerate(slots.tolist()) if slot >= 0}


@pytest.mark.parametrize(
    ("num_rows", "columns", "part_rows", "ranks", "max_rank"),
    [
        (1, 64, (48,), (8,), 8),
        (5, 72, (40, 24, 24), (3, 8, 0), 8),
        (37, 264, (300, 300), (16, 1), 16),
        (20, 136, (64, 32, 32), (40, 37, 33), 40),
        (3, 33, (17,), (256,), 256),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters_of_rows_small(
    dtype: Any,
    num_rows: int,
    columns: int,
    part_rows: tuple[int, ...],
    ranks: tuple[int, ...],
    max_rank: int,
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
) -> None:
    slots = np.random.default_rng(num_rows).integers(-1, len(ranks), num_rows)
    x, out = random_array(1, (num_rows, columns), dtype), random_array(2, (num_rows, sum(part_rows)), dtype)
    found = []
    for ops in (cpu_ops, cuda_ops):
        stack = stack_of(ops, dtype, columns, part_rows, ranks, max_rank, num_rows)
        sums = from_numpy(out, ops.device)
        ops._add_adapters(from_numpy(x, ops.device), stack, rows_of(ops, slots, len(ranks)), sums)
        found.append(sums.numpy().copy())
    assert_close(found[1], found[0], dtype)
    np.testing.assert_array_equal(found[1][slots < 0], out[slots < 0])


@pytest.mark.parametrize(
    ("num_rows", "columns", "part_rows", "ranks", "max_rank"),
    [
        (1, 2056, (256,), (16,), 16),
        (6, 1096, (528, 40, 24), (16, 9), 16),
        (40, 1024, (40, 24), (24, 0, 7), 24),
        (19, 1160, (64, 136, 8), (100, 256), 256),
    ],
)
@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_slices_of_the_width_change_no_bit_small(
    dtype: Any,
    num_rows: int,
    columns: int,
    part_rows: tuple[int, ...],
    ranks: tuple[int, ...],
    max_rank: int,
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
) -> None:
    """A row's sums are the same in blocks of their own, in one block, and without the other rows."""
    slots = np.random.default_rng(num_rows).integers(-1, len(ranks), num_rows)
    slots[0] = len(ranks) - 1
    x, out = random_array(1, (num_rows, columns), dtype), random_array(2, (num_rows, sum(part_rows)), dtype)

    def add(ops: Ops, room: int, chosen: slice = slice(None)) -> Array:
        stack = stack_of(ops, dtype, columns, part_rows, ranks, max_rank, num_rows, room)
        sums = from_numpy(out[chosen].copy(), ops.device)
        ops._add_adapters(from_numpy(x[chosen], ops.device), stack, rows_of(ops, slots[chosen], len(ranks)), sums)
        return sums.numpy().copy()

    whole, sliced = (add(cuda_ops, room) for room in (1, num_slices(columns)))
    assert_close(sliced, add(cpu_ops, 1), dtype)
    np.testing.assert_array_equal(sliced, whole)
    np.testing.assert_array_equal(sliced[slots < 0], out[slots < 0])
    np.testing.assert_array_equal(sliced[:1], add(cuda_ops, num_slices(columns), slice(1)))


@pytest.mark.parametrize(
    ("num_rows", "columns", "part_rows", "ranks", "max_rank"),
    [
        (5, 64, (48, 16), (8, 5), 8),
        (37, 1096, (64, 40, 24), (16, 9, 0), 16),
        (6, 2056, (64,), (40, 33), 40),  # 96 threads a row
        (1, 4096, (32, 32), (16,), 16),
    ],
)
def test_a_norm_beside_the_product_with_a_small(
    num_rows: int,
    columns: int,
    part_rows: tuple[int, ...],
    ranks: tuple[int, ...],
    max_rank: int,
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
) -> None:
    """The norm has the bits of one by itself, and a row's sums do not depend on the others'."""
    dtype, room, eps = bfloat16, num_slices(columns) + 1, 1e-5
    slots = np.random.default_rng(num_rows).integers(-1, len(ranks), num_rows)
    slots[0] = len(ranks) - 1
    x, gains = random_array(1, (num_rows, columns), dtype, 3.0), random_array(2, (columns,), dtype)
    out = random_array(3, (num_rows, sum(part_rows)), dtype)

    def add(ops: Ops, chosen: slice = slice(None)) -> tuple[Array, Array]:
        stack = stack_of(ops, dtype, columns, part_rows, ranks, max_rank, num_rows, room)
        stream, sums = from_numpy(x[chosen], ops.device), from_numpy(out[chosen].copy(), ops.device)
        norm = RMSNorm(from_numpy(gains, ops.device), eps, poisoned(stream.shape, dtype, ops.device))
        rows = rows_of(ops, slots[chosen], len(ranks))
        of_norm = ops._norm_and_begin_adapters(stream, norm, stack, rows, sums)
        assert of_norm == (ops is cuda_ops)
        if not of_norm:
            ops._normalise(stream, norm)
            ops._begin_adapters(norm.scratch, stack, rows, sums)
        ops._finish_adapters(norm.scratch, stack, rows, sums, of_norm=of_norm)
        return norm.scratch.numpy().copy(), sums.numpy().copy()

    normed, sums = add(cuda_ops)
    by_itself = cuda_ops.rmsnorm(from_numpy(x, cuda_ops.device), from_numpy(gains, cuda_ops.device), eps)
    np.testing.assert_array_equal(normed, by_itself.numpy())
    assert_close(sums, add(cpu_ops)[1], dtype)
    np.testing.assert_array_equal(sums[slots < 0], out[slots < 0])
    np.testing.assert_array_equal(sums[:1], add(cuda_ops, slice(1))[1])


def test_sums_beyond_float16_small(cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    """The product with A may be larger than its elements can be, or so small that they lose its bits."""
    slots, found = np.array([0, 0]), []
    x, out = np.full((2, 64), 200.0, float16), np.zeros((2, 32), float16)
    x[1] = 2e-5
    for ops in (cpu_ops, cuda_ops):
        stack = stack_of(ops, float16, 64, (16, 16), (8,), 8, 2)
        stack.a.upload(np.full(stack.a.shape, 20.0, float16))
        stack.b.upload(np.full(stack.b.shape, 2.0**-10, float16))
        sums = from_numpy(out, ops.device)
        ops._add_adapters(from_numpy(x, ops.device), stack, rows_of(ops, slots, 1), sums)
        found.append(sums.numpy().copy())
    assert np.isfinite(found[0]).all()
    np.testing.assert_allclose(found[1].astype(np.float32), found[0].astype(np.float32), rtol=2e-3)


def test_adapters_in_a_recording_small(cuda_device: Any, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    """Kernels that read groups before they wait find those of this run's slots."""
    num_rows, columns, part_rows, dtype = 5, 64, (32, 32), bfloat16
    x, out = random_array(1, (num_rows, columns), dtype), random_array(2, (num_rows, 64), dtype)
    stacks = [stack_of(ops, dtype, columns, part_rows, (8, 8), 8, num_rows) for ops in (cpu_ops, cuda_ops)]
    rows = rows_of(cuda_ops, np.full(num_rows, -1), 2)
    inputs, sums = (from_numpy(array, cuda_ops.device) for array in (x, out))
    cuda_ops.reserve_adapters(dtype)
    with cuda_device.capture() as recorded:
        cuda_ops.group_rows(rows, 2)
        for _ in range(2):
            cuda_ops._add_adapters(inputs, stacks[1], rows, sums)
    graph = recorded()
    for slots in (np.array([1, -1, 0, 1, 1]), np.array([-1, 0, 0, -1, 1])):
        rows.slots.upload(slots.astype(np.int32))
        sums.upload(out)
        graph.launch()
        expected = from_numpy(out.copy(), cpu_ops.device)
        for _ in range(2):
            cpu_ops._add_adapters(from_numpy(x, cpu_ops.device), stacks[0], rows_of(cpu_ops, slots, 2), expected)
        assert_close(sums.numpy(), expected.numpy(), dtype, roundings=2)


@pytest.mark.parametrize("max_rank", [16, 24, 40])
@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
def test_silu_after_adapters_small(dtype: Any, max_rank: int, cuda_ops: CudaOps) -> None:
    """The activation in the same kernel gives the bits of one of its own, in rows with an adapter and without."""
    num_rows, columns, inner, ranks = 37, 136, 264, (max_rank, 3, 0)
    slots = np.random.default_rng(1).integers(-1, len(ranks), num_rows)
    x = from_numpy(random_array(1, (num_rows, columns), dtype), cuda_ops.device)
    values = random_array(2, (num_rows, 2 * inner), dtype)
    stack = stack_of(cuda_ops, dtype, columns, (inner, inner), ranks, max_rank, num_rows)
    rows = rows_of(cuda_ops, slots, len(ranks))
    product, apart, fused = (
        from_numpy(values, cuda_ops.device),
        poisoned((num_rows, inner), dtype, cuda_ops.device),
        poisoned((num_rows, inner), dtype, cuda_ops.device),
    )
    cuda_ops._add_adapters(x, stack, rows, product)
    cuda_ops._activate("silu_mul", product, apart)
    product = from_numpy(values, cuda_ops.device)
    cuda_ops._begin_adapters(x, stack, rows, product)
    assert launch_expand_silu_mul(cuda_ops.device, x, stack, rows, product, fused)
    np.testing.assert_array_equal(fused.numpy(), apart.numpy())


@pytest.mark.parametrize("dtype", [float16, bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "inner", "ranks"), [(37, 328, (16, 0, 5)), (3, 4360, (7, 16)), (1, 128, (16,))])
def test_the_next_product_with_a_small(
    num_rows: int, inner: int, ranks: tuple[int, ...], dtype: Any, cuda_ops: CudaOps, cpu_ops: CpuOps
) -> None:
    """Of an activation's result, it is done where that is made; a row's sums do not depend on the others'."""
    columns, max_rank, features = 64, 16, 40
    slots = np.random.default_rng(num_rows).integers(-1, len(ranks), num_rows)
    slots[0] = len(ranks) - 1
    x, product = random_array(1, (num_rows, columns), dtype), random_array(2, (num_rows, 2 * inner), dtype)
    out = random_array(3, (num_rows, features), dtype)

    def add(ops: Ops, chosen: slice = slice(None)) -> Array:
        stack = stack_of(ops, dtype, columns, (inner, inner), ranks, max_rank, num_rows, room=40)
        following = replace(stack_of(ops, dtype, inner, (features,), ranks, max_rank, 1), selection=stack.selection)
        rows = rows_of(ops, slots[chosen], len(ranks))
        stream, gates, sums = (from_numpy(array[chosen].copy(), ops.device) for array in (x, product, out))
        activated = poisoned((gates.shape[0], inner), dtype, ops.device)
        ops._begin_adapters(stream, stack, rows, gates)
        ops._finish_adapters_and_activate(stream, stack, rows, "silu_mul", gates, activated, next_stack=following)
        if isinstance(ops, CudaOps):
            begun = ops._begun
            assert can_take_begun(begun, activated, following, sums)
        ops._begin_adapters(activated, following, rows, sums)
        ops._finish_adapters(activated, following, rows, sums)
        if isinstance(ops, CudaOps):
            assert begun is not None
            assert begun.slices == -(-inner // 256)
            assert ops._begun is None
        return sums.numpy().copy()

    sums = add(cuda_ops)
    assert_close(sums, add(cpu_ops), dtype, roundings=2)
    np.testing.assert_array_equal(sums[slots < 0], out[slots < 0])
    np.testing.assert_array_equal(sums[:1], add(cuda_ops, slice(1)))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("kind", ["plain", "accumulate", "norm and gate"])
def test_linear_with_adapters_small(kind: str, quantised: bool, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    """Whatever surrounds the product, and whatever the weight's format."""
    num_rows, columns, features, dtype = 6, 128, 96, bfloat16
    slots = np.array([1, -1, 0, 0, 1, -1])
    x, values = random_array(1, (num_rows, columns), dtype), random_array(2, (features, columns), dtype, 0.1)
    found = []
    for ops in (cpu_ops, cuda_ops):
        device = ops.device
        stack = stack_of(ops, dtype, columns, (48, 48), (8, 5), 8, num_rows)
        weight = LinearWeight.of(from_numpy(values, device))
        if quantised:
            arrays = Int8RowsFormat.quantize(values.astype(np.float32))
            tensors = {name: from_numpy(array, device) for name, array in arrays.items()}
            weight = LinearWeight((WeightPart(Int8RowsFormat(), (features, columns), tensors),))
        weight = replace(weight, adapters=stack)
        stack.selection.rows = rows_of(ops, slots, 2)
        prologue: Prologue | None = None
        epilogue: Epilogue | None = None
        out = poisoned((num_rows, features), dtype, device)
        if kind == "accumulate":
            epilogue, out = Accumulate(), from_numpy(random_array(3, (num_rows, features), dtype), device)
        elif kind == "norm and gate":
            norm = from_numpy(random_array(4, (columns,), dtype), device)
            prologue = RMSNorm(norm, 1e-6, empty(x.shape, dtype, device))
            epilogue = Activate("silu_mul", empty((num_rows, features), dtype, device))
            out = poisoned((num_rows, features // 2), dtype, device)
        ops.linear(from_numpy(x, device), weight, prologue=prologue, epilogue=epilogue, out=out)
        found.append(out.numpy().copy())
    assert_close(found[1], found[0], dtype)


@pytest.mark.parametrize("enforce_eager", [pytest.param(True, id="eager small"), pytest.param(False, id="graphs")])
def test_a_model_with_adapters(enforce_eager: bool, tmp_path: Path, cuda_device: Any, cuda_ops: CudaOps) -> None:
    """Chunks of prompts and decodes, by two adapters and by none: the logits are those of the CPU."""
    folder = build(TINY_MODELS["llama"], tmp_path / "model")
    model, params = load_config(folder), SamplingParams(max_tokens=8, temperature=0.0)
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.gate_proj": (64, 96)}
    modules = {f"model.layers.{layer}.{name}": shape for layer in range(3) for name, shape in shapes.items()}
    adapters = [
        read_adapter(TinyAdapter(modules, seed, rank=rank).write(tmp_path / str(seed)), model, max_rank=16)
        for seed, rank in ((1, 16), (2, 3))
    ]
    found: list[list[Array]] = []
    for device, ops in ((CPU, CpuOps()), (cuda_device, cuda_ops)):
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            block_size=8,
            max_num_seqs=4,
            num_kv_blocks=40,
            max_loras=2,
            enforce_eager=enforce_eager,
        )
        runner = ModelRunner(config, model, device, ops, max_lora_rank=16)
        rows = [Row(slot, scattered_blocks(8, first=8 * slot), prompt()[slot:20], params) for slot in range(4)]
        logits = []
        for number, counts in enumerate(([20, 9, 18, 17], [1, 10, 1, 1], [1, 1, 1, 1])):
            batch = step_batch(rows, 8, counts)
            batch.adapter_slots = np.repeat(np.array([0, 1, -1, 1], np.int32), counts)
            batch.adapter_loads = [] if number else list(enumerate(adapters))
            running = runner.start(batch)
            logits.append(running.logits.numpy()[: batch.num_sampled].copy())
            running.result()
            for row in rows:
                if row.num_computed == len(row.tokens):
                    row.output.append(5)
        found.append(logits)
    for ours, expected in zip(found[1], found[0], strict=True):
        assert relative_error(ours, expected.astype(np.float64)) < 1e-4
