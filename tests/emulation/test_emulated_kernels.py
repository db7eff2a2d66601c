"""The kernels' own sources, run on the CPU by `tests/emulation`: each of another kind, on small shapes.

Every test runs three times: threads in turn from the first, copies done when they are started; from the last, copies
done when they are waited for; and watched for races. `make test-emulated` runs the GPU tests in the same way.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.cuda.attention.decode import CLUSTERED_ATTENTION_DECODE
from tessera.engine.ops.cuda.attention.sm90_prefill import SM90_PREFILL
from tessera.engine.ops.cuda.linear import sm90
from tessera.engine.ops.cuda.linear.decode import MATMUL_DECODE
from tessera.engine.ops.cuda.linear.portable import FLAT_NARROW, LARGE, NARROW, WIDE, Tile
from tessera.engine.ops.cuda.linear.sm90 import Plan
from tessera.engine.ops.cuda.lora import choices
from tessera.engine.ops.cuda.training.sm90 import TurnedPlan
from tessera.engine.tensor import CPU, bfloat16, empty, float16, float32, from_numpy
from tests.emulation.device import COMPILER, EmulatedDevice, EmulationError, kernel_folder
from tests.emulation.tensor_maps import emulated_tensor_maps
from tests.gpu.attention.decode_inputs import DecodeInputs
from tests.gpu.attention.rows import assert_splits_are_done, attend, poison_splits
from tests.gpu.ops.sampled import sample, varied_logits, varied_settings
from tests.gpu.products.adapted import PLANS as ADAPTED_PLANS
from tests.gpu.products.adapted import check_adapted_product
from tests.gpu.products.adapters import rows_of, stack_of
from tests.gpu.products.checks import check_guards, guarded
from tests.gpu.products.portable import launch, name
from tests.gpu.training.products import check_product
from tests.support.cases.linear_calls import norm_product, norm_product_silu_mul, product_silu_mul
from tests.support.cases.op_cases import AttentionCase, AttentionInputs, random_array
from tests.support.cases.sampling_cases import N_SIGMA
from tests.support.references.reference import assert_close, assert_same_cache

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(COMPILER) is None,
    reason=f"the kernels are compiled for the CPU by {COMPILER} on Linux",
)

LATE = {"EMULATED_ORDER": "last_first", "EMULATED_LATE_COPIES": "1"}
WATCHED = {"EMULATED_RACES": "1"}


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    return kernel_folder(pytestconfig)


# Watched in both orders: a race is found however early its copy came, and one compilation serves both.
@pytest.fixture(params=[WATCHED, {**WATCHED, **LATE}], ids=["first_first", "last_first"])
def variables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in request.param.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def ops(variables: None, folder: Path) -> CudaOps:
    """As on sm_100a, which has none of the kernels of sm_90a."""
    return CudaOps(EmulatedDevice(folder, multiprocessors=2))  # type: ignore[arg-type]


@pytest.fixture
def sm90_ops(variables: None, folder: Path) -> Iterator[CudaOps]:
    with emulated_tensor_maps():
        yield CudaOps(EmulatedDevice(folder, multiprocessors=4, arch="90a"))  # type: ignore[arg-type]


def emulated(ops: CudaOps) -> EmulatedDevice:
    device: object = ops.device
    assert isinstance(device, EmulatedDevice)
    return device


def test_adapters_of_rows(ops: CudaOps) -> None:
    """Two adapters, the second of a smaller rank, and rows without one."""
    slots, ranks, dtype = np.array([1, -1, 0, 1, -1]), (8, 3), bfloat16
    x, out = random_array(1, (5, 72), dtype), random_array(2, (5, 88), dtype)
    found = []
    for each in (CpuOps(), ops):
        stack = stack_of(each, dtype, 72, (40, 24, 24), ranks, 8, 5)
        sums = from_numpy(out, each.device)
        each._add_adapters(from_numpy(x, each.device), stack, rows_of(each, slots, 2), sums)
        found.append(sums.numpy().copy())
    assert_close(found[1], found[0], dtype)


@pytest.mark.parametrize(("m", "k", "n", "units"), [(1, 264, 200, 4), (5, 1032, 64, 4), (16, 72, 240, 14)])
def test_products_of_few_rows(m: int, k: int, n: int, units: int, ops: CudaOps) -> None:
    """With the norm before and the activation after them; a unit is eight columns of a block's."""
    arrays = random_array(1, (m, k), bfloat16), random_array(2, (k,), bfloat16), random_array(3, (n, k), bfloat16, 0.1)
    results = []
    for each in (CpuOps(), ops):
        x, norm, weight = (from_numpy(array, each.device) for array in arrays)
        normed, gate_up = empty((m, k), bfloat16, each.device), empty((m, n), bfloat16, each.device)
        out = norm_product_silu_mul(each, x, norm, 1e-5, weight, normed=normed, gate_up=gate_up)
        results.append(out.numpy())
    assert_close(results[1], results[0], bfloat16, roundings=2)
    ((spec, template),) = emulated(ops).launched
    assert spec is MATMUL_DECODE
    assert template[MATMUL_DECODE.template.index("UNITS")] == str(units)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n", "size"),
    [
        *((1, 1544, 40, "3 3"), (1, 2056, 40, "3 3"), (6, 520, 26, "2 3")),
        *((3, 1032, 66, "5 2"), (13, 1032, 66, "5 2"), (11, 2312, 74, "5 3")),
    ],
)
def test_products_of_as_many_units_as_a_block_has(
    m: int, k: int, n: int, size: str, normed: bool, ops: CudaOps
) -> None:
    """Without a gate; `size`: units and stages."""
    arrays = random_array(1, (m, k), bfloat16), random_array(2, (k,), bfloat16), random_array(3, (n, k), bfloat16, 0.03)
    results = []
    for each in (CpuOps(), ops):
        x, norm, weight = (from_numpy(array, each.device) for array in arrays)
        if normed:
            scratch, out = empty((m, k), bfloat16, each.device), empty((m, n), bfloat16, each.device)
            results.append(norm_product(each, x, norm, 1e-5, weight, normed=scratch, out=out).numpy())
        else:
            results.append(each.matmul(x, weight).numpy())
    assert_close(results[1], results[0], bfloat16, roundings=2)
    (launched,) = emulated(ops).launched
    found = dict(zip(MATMUL_DECODE.template, launched[1], strict=True))
    if normed or size != "5 2":  # longer rings where no attention follows
        assert f"{found['UNITS']} {found['STAGES']}" == size


@pytest.mark.parametrize("choice", [(LARGE, 1), (NARROW, 1), (WIDE, 2), (FLAT_NARROW, 8)], ids=name)
def test_products_of_many_rows(choice: tuple[Tile, int], ops: CudaOps) -> None:
    """Tiles that end beyond the result; parts of a sum by warps and by blocks of a cluster."""
    dtype = float16 if choice[0] is WIDE else bfloat16
    m, k, n = choice[0].m + 3, 264 if choice[1] == 1 else 1032, choice[0].n + 6
    arrays = random_array(4, (m, k), dtype), random_array(5, (n, k), dtype, 0.03), random_array(6, (n,), dtype)
    out, whole = guarded((m, n), dtype, ops.device)
    x, weight, bias = (from_numpy(array, ops.device) for array in arrays)
    launch(ops.device, choice, x, weight, bias, out)
    assert_close(out.numpy(), CpuOps().matmul(*(from_numpy(array, CPU) for array in arrays)).numpy(), dtype)
    check_guards(whole)


ROWS = ((1, 1), (1, 40), (1, 0), (1, 130))


@pytest.mark.parametrize("rows", [ROWS, ((1, 300),)], ids=["rows", "one row"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_decode_steps(rows: tuple[tuple[int, int], ...], fused: bool, ops: CudaOps) -> None:
    """Norms of heads, rotary embedding, KV store and attention; the blocks of one row are a cluster."""
    case = AttentionCase("", rows, num_heads=8, num_kv_heads=2, head_dim=64, dtype=bfloat16)
    step = DecodeInputs.of(case)
    actual, expected = step.run(ops, fused=fused), step.run(CpuOps())
    assert_close(actual[0], expected[0], bfloat16)
    for cache, expected_cache in zip(actual[1:], expected[1:], strict=True):
        assert_same_cache(cache, expected_cache, bfloat16)
    clustered = CLUSTERED_ATTENTION_DECODE in {spec for spec, _ in emulated(ops).launched}
    assert clustered == (fused and len(rows) == 1)


def test_attention_of_prompts(ops: CudaOps) -> None:
    rows = ((37, 37), (1, 20), (0, 0), (20, 90))
    case = AttentionCase("", rows, num_heads=4, num_kv_heads=2, head_dim=64, dtype=bfloat16, sliding_window=50)
    inputs = AttentionInputs(case)
    assert_close(attend(ops, inputs), attend(CpuOps(), inputs), bfloat16)


@pytest.mark.parametrize("filtered", [False, True])
def test_sampling(filtered: bool, ops: CudaOps) -> None:
    """By the eight blocks of a cluster; ties, rows without a finite logit, extreme settings."""
    rng = np.random.default_rng(7)
    logits, settings = varied_logits(rng, 3, 520), varied_settings(rng, 3)
    expected = sample(CpuOps(), logits, CPU, filtered, **settings)
    assert (sample(ops, logits, ops.device, filtered, **settings) == expected).all()


@pytest.mark.parametrize("clustered", [True, False])
def test_top_n_sigma(clustered: bool, ops: CudaOps) -> None:
    """By the blocks of a cluster together, and by one block."""
    if not clustered:
        emulated(ops).max_shared_bytes = 0
    logits = varied_logits(np.random.default_rng(8), 4, 520)
    settings = {"seed": np.arange(4), "temperature": 1.5, "top_n_sigma": [0.5, 1.0, 2.0, 4.0]}
    expected = sample(CpuOps(), logits, CPU, True, **settings)
    assert (sample(ops, logits, ops.device, True, **settings) == expected).all()


@pytest.mark.parametrize("clustered", [True, False])
def test_cases_of_top_n_sigma(clustered: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one order of the threads: the same kernels run in both above."""
    monkeypatch.setenv("EMULATED_RACES", "1")
    ops = CudaOps(EmulatedDevice(folder, multiprocessors=2))  # type: ignore[arg-type]
    if not clustered:
        emulated(ops).max_shared_bytes = 0
    cases = [case[1:] for case in N_SIGMA]
    logits = np.full((len(cases), max(len(row) for row, _, _ in cases)), -np.inf, np.float32)
    for i, (row, _, _) in enumerate(cases):
        logits[i, : len(row)] = row
    defaults = {"top_n_sigma": 0.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings = {name: [case.get(name, off) for _, case, _ in cases] for name, off in defaults.items()}
    tokens = sample(ops, logits, ops.device, True, position=np.arange(len(cases)), **settings)
    assert [int(token) in kept for token, (_, _, kept) in zip(tokens, cases, strict=True)] == [True] * len(cases)
    assert (tokens == sample(CpuOps(), logits, CPU, True, position=np.arange(len(cases)), **settings)).all()


# -- sm_90a ---------------------------------------------------------------------------------------

ONE, NARROW_SPLIT, PAIR, WIDE_PAIR, LOGITS = (
    sm90.Plan(sm90.TILES[5]),
    sm90.Plan(sm90.TILES[7], splits=2),
    sm90.Plan(sm90.TILES[3], sharing=2),
    sm90.WIDE_PLAN,
    sm90.LOGITS_PLANS[2],
)
HOPPER_PRODUCTS = {
    "several tiles": (ONE, (300, 136, 208)),
    "a split sum": (NARROW_SPLIT, (70, 392, 72)),
    "blocks that share": (PAIR, (140, 264, 264)),
    "wide tiles": (WIDE_PAIR, (200, 264, 264)),
    "logits": (LOGITS, (70, 72, 136)),
}


@pytest.mark.parametrize("kind", HOPPER_PRODUCTS)
def test_products_on_sm_90a(kind: str, sm90_ops: CudaOps) -> None:
    """Edges in all directions, more steps than the ring has stages, bias, a sum with what is there, activation."""
    sm90_ops.device.multiprocessors = 2  # several tiles for each
    plan, (m, k, n) = HOPPER_PRODUCTS[kind]
    dtype = float16 if plan.sharing > 1 else bfloat16
    logits = plan is LOGITS
    arrays = random_array(4, (m, k), dtype), random_array(5, (n, k), dtype, 0.03), random_array(6, (n,), dtype)
    x, weight, bias = (from_numpy(array, sm90_ops.device) for array in arrays)
    out, whole = guarded((m, n), float32 if logits else dtype, sm90_ops.device)
    sm90.launch(sm90_ops.device, plan, x, weight, None if logits else bias, out)
    cpu = CpuOps()
    a, b, c = (from_numpy(array, CPU) for array in arrays)
    expected = cpu.matmul(a, b, out=empty((m, n), float32, CPU)) if logits else cpu.matmul(a, b, c)
    assert_close(out.numpy(), expected.numpy(), out.dtype, typical=4)
    check_guards(whole)
    if logits:
        return
    sm90.launch(sm90_ops.device, plan, x, weight, bias, out, accumulate=True)
    cpu.matmul(a, b, c, expected, accumulate=True)
    assert_close(out.numpy(), expected.numpy(), dtype, roundings=2)
    if n % 16 == 0:
        gated, whole = guarded((m, n // 2), dtype, sm90_ops.device)
        sm90.launch(sm90_ops.device, plan, x, weight, None, gated, silu_mul=True)
        expected = product_silu_mul(cpu, a, b, gate_up=empty((m, n), dtype, CPU))
        assert_close(gated.numpy(), expected.numpy(), dtype, roundings=2)
        sm90.launch(sm90_ops.device, plan, x, weight, None, gated, gelu_mul=True)
        expected = product_silu_mul(cpu, a, b, gate_up=empty((m, n), dtype, CPU), function="gelu_tanh_mul")
        assert_close(gated.numpy(), expected.numpy(), dtype, roundings=2)
        check_guards(whole)


TURNED_PRODUCTS = {  # x turned or not; rows, columns, summed
    "an input's gradient": (False, TurnedPlan(ONE), (150, 136, 200)),
    "an input's gradient by pairs": (False, TurnedPlan(PAIR), (140, 264, 264)),
    "a weight's gradient": (True, TurnedPlan(ONE), (200, 136, 333)),
    "a weight's gradient by pairs": (True, TurnedPlan(PAIR), (328, 200, 149)),
    "an input's gradient by wide tiles": (False, TurnedPlan(WIDE_PAIR), (200, 264, 264)),
    "a weight's gradient by wide tiles": (True, TurnedPlan(WIDE_PAIR), (424, 264, 261)),
    "slices by wide tiles": (True, TurnedPlan(WIDE_PAIR, slices=2), (72, 200, 283)),
    "slices of a sum": (True, TurnedPlan(sm90.Plan(sm90.TILES[6]), slices=2), (72, 200, 283)),
}


@pytest.mark.parametrize("kind", TURNED_PRODUCTS)
def test_products_of_the_backward_on_sm_90a(kind: str, sm90_ops: CudaOps) -> None:
    """Edges in all directions, more steps than the ring has stages, a sum with what is there."""
    sm90_ops.device.multiprocessors = 2  # several tiles for each
    turned_x, plan, sizes = TURNED_PRODUCTS[kind]
    if not plan.plan.tile.wide:
        sm90_ops.device.max_shared_bytes = 120 << 10
    dtype = float16 if plan.plan.sharing > 1 else bfloat16
    check_product(sm90_ops.device, sizes, np.dtype(dtype), turned_x=turned_x, plan=plan)


PROMPTS = AttentionCase(
    "", ((37, 37), (1, 20), (0, 0), (20, 290)), num_heads=4, head_dim=64, dtype=bfloat16, sliding_window=150
)
SPLIT_PROMPT = AttentionCase(
    "", ((40, 40), (20, 1100)), num_heads=2, num_kv_heads=1, head_dim=128, block_size=24, dtype=float16
)


@pytest.mark.parametrize("case", [PROMPTS, SPLIT_PROMPT], ids=["prompts", "split keys"])
def test_attention_of_prompts_on_sm_90a(case: AttentionCase, sm90_ops: CudaOps) -> None:
    inputs = AttentionInputs(case)
    partials = poison_splits(sm90_ops)
    assert partials is not None
    assert_close(attend(sm90_ops, inputs), attend(CpuOps(), inputs), case.dtype)
    assert SM90_PREFILL in {spec for spec, _ in emulated(sm90_ops).launched}
    assert np.isfinite(partials.numpy()).any() == (case is SPLIT_PROMPT)
    assert_splits_are_done(sm90_ops)


# -- what the emulation finds ---------------------------------------------------------------------


def broken(old: str, new: str, folder: Path, arch: str = "100a", multiprocessors: int = 132) -> CudaOps:
    """Kernels with `new` in the place of `old`, which the first launched has: in its file, else in its headers."""
    found = False

    def edit(texts: dict[str, str]) -> dict[str, str]:
        nonlocal found
        holders = {name for name, text in texts.items() if old in text}
        holders = {name for name in holders if name.endswith(".cu")} or holders
        found |= bool(holders)
        if not found:
            raise ValueError(f"the kernel has no {old!r} any more")  # no failure of the kernel's
        return {name: text.replace(old, new) if name in holders else text for name, text in texts.items()}

    return CudaOps(EmulatedDevice(folder, edit, multiprocessors, arch))  # type: ignore[arg-type]


WAIT = "copy_async_wait<STAGES - 2>();"
ALWAYS = 3  # faults of each kind; each takes a second to compile


def some_of(faults: Mapping[str, object]) -> list[Any]:
    """The first few; the rest where `make test-emulated` asks for them."""
    rest = pytest.mark.skipif(
        os.environ.get("TESSERA_EMULATED") != "1", reason="`make test-emulated` tries more faults"
    )
    return [pytest.param(name, marks=() if index < ALWAYS else rest) for index, name in enumerate(faults)]


BROKEN = {  # a piece of linear/matmul.cu and what stands there instead
    "a wait too short": (WAIT, "copy_async_wait<STAGES - 1>();"),
    "no barrier": (f"{WAIT}\n        __syncthreads();", WAIT),
    "a tile too far": ("T* const to = stages + tile_k % STAGES", "T* const to = stages + (tile_k % STAGES + 1)"),
    "an element too far": ("if (row >= num_rows ||", "if (row > num_rows ||"),
    "a lane that meets no other": ("let_next_kernel_start();", "if (threadIdx.x == 0) __syncwarp();"),
}


@pytest.mark.parametrize("fault", some_of(BROKEN))
def test_a_broken_product_is_noticed(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = 0
    for variables in ({}, LATE):
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            try:
                test_products_of_many_rows((NARROW, 1), broken(*BROKEN[fault], folder))
            except (AssertionError, EmulationError) as error:
                print(f"{fault}: {str(error).splitlines()[0]}")
                noticed += 1
    assert noticed, "a kernel that is wrong passes"


RACES: dict[str, tuple[Callable[[CudaOps], None], str, str]] = {
    "a stage in use is filled": (partial(test_products_of_many_rows, (NARROW, 1)), *BROKEN["a wait too short"]),
    "threads do not meet": (partial(test_products_of_many_rows, (NARROW, 1)), *BROKEN["no barrier"]),
    "lanes do not meet": (partial(test_products_of_few_rows, 16, 72, 240, 14), "__syncwarp();", ""),
    "blocks do not meet": (partial(test_sampling, True), "  Blocks::sync();\n", ""),
}


@pytest.mark.parametrize("fault", some_of(RACES))
def test_a_race_is_found(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order threads run: without the watch, lanes that do not meet give right results."""
    monkeypatch.setenv("EMULATED_RACES", "1")
    run, old, new = RACES[fault]
    with pytest.raises(EmulationError, match=r"a race of thread \d+ of block \d+ at .+ and thread \d+ of block"):
        run(broken(old, new, folder))


def test_a_weight_that_is_computed_just_before_is_noticed(sm90_ops: CudaOps) -> None:
    """A recorded product copies its weight at once; with `overlaps=False` it waits."""
    x = from_numpy(random_array(1, (32, 64), bfloat16), sm90_ops.device)
    gram, squared = (from_numpy(np.zeros((32, 32), bfloat16), sm90_ops.device) for _ in range(2))
    graphs = []
    for overlaps in (True, False):
        with emulated(sm90_ops).capture(overlaps=overlaps) as finish:
            sm90_ops.matmul(x, x, out=gram)
            sm90_ops.matmul(gram, gram, out=squared)
        graphs.append(finish())
    with pytest.raises(EmulationError, match="takes for a weight what a kernel writes"):
        graphs[0].launch()
    graphs[1].launch()
    assert_close(squared.numpy(), CpuOps().matmul(*[from_numpy(gram.numpy(), CPU)] * 2).numpy(), bfloat16)


ARRIVE = "if (CLUSTERED && num_blocks > 1) Blocks::arrive();"


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        (f"{ARRIVE} if (CLUSTERED && part == 0 && lane == 0) __syncwarp();", "wait for some that never come"),
        ("", "waits for a cluster at which it has not arrived"),
    ],
    ids=["one hangs", "no arrival"],
)
def test_a_cluster_that_would_hang_is_noticed(instead: str, message: str, folder: Path) -> None:
    case = AttentionCase("", ((1, 300),), num_heads=8, num_kv_heads=2, head_dim=64, dtype=bfloat16)
    with pytest.raises(EmulationError, match=message):
        DecodeInputs.of(case).run(broken(ARRIVE, instead, folder))


@pytest.mark.parametrize(("plan", "kind"), [(ADAPTED_PLANS[0], "gate"), (ADAPTED_PLANS[-1], "parts")])
def test_products_with_adapters_on_sm_90a(
    plan: Plan, kind: str, sm90_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole sums of wide tiles, and of narrow ones that a cluster shares."""
    monkeypatch.setattr(choices, "FUSES_PRODUCTS", True)
    check_adapted_product(plan, kind, sm90_ops, CpuOps())


def multiply(kind: str, ops: CudaOps) -> None:
    test_products_on_sm_90a(kind, ops)


def multiply_backward(kind: str, ops: CudaOps) -> None:
    test_products_of_the_backward_on_sm_90a(kind, ops)


def attend_to(case: AttentionCase, ops: CudaOps) -> None:
    test_attention_of_prompts_on_sm_90a(case, ops)


WAIT_FOR_STAGE = "barrier_wait(&full[at.stage], at.parity);"
SYNCHRONIZE = "fence_shared_for_async();\n    named_barrier_wait(GROUP_BARRIER + consumer, WARPGROUP_SIZE);"
RELEASE_KEYS, NEXT_KEYS = "release(&barriers.empty_k[next_stage]);", "own.multiply_keys(buffer, next_stage);"
RELEASE_VALUES = (
    "wgmma_wait<0>();\n    pin(own.outputs);\n    pin(own.weights);\n    release(&barriers.empty_v[stage]);"
)
RELEASED_EARLY = "release(&barriers.empty_v[stage]);\n    wgmma_wait<0>();"
SEVERAL, SPLIT = partial(multiply, "several tiles"), partial(multiply, "a split sum")
SHARED, THREE_GROUPS = partial(multiply, "blocks that share"), partial(multiply, "wide tiles")
INPUT, WEIGHT = (partial(multiply_backward, f"{kind}'s gradient") for kind in ("an input", "a weight"))
SHARED_WEIGHT = partial(multiply_backward, "a weight's gradient by pairs")
WIDE_WEIGHT = partial(multiply_backward, "a weight's gradient by wide tiles")
ATTEND = partial(attend_to, PROMPTS)
PRODUCT_AND_COPY = "a race of a product of .* and a copy to"
HUNG = r"never come; (.* )?256 of block 0 from thread 0 on at sm90\.cuh:\d+, called at sm90_matmul\.cuh:\d+"
HOPPER_FAULTS: dict[str, tuple[Callable[[CudaOps], None], str, str, str]] = {
    "no wait for a stage": (SEVERAL, WAIT_FOR_STAGE, "", "a race|more arrivals"),
    "another parity": (SEVERAL, WAIT_FOR_STAGE, f"{WAIT_FOR_STAGE[:-2]} ^ 1);", "a race|more arrivals"),
    "less bytes than come": (SEVERAL, "WEIGHT_ELEMENTS * sizeof(T)", "WEIGHT_ELEMENTS", HUNG),
    "warps that release nothing": (SEVERAL, "if (lane == 0) barrier_arrive", "if (false) barrier_arrive", HUNG),
    "no wait before a stage is released": (SEVERAL, "wgmma_wait<1>();", "", PRODUCT_AND_COPY),
    "no wait for the sums": (SEVERAL, "wgmma_wait<0>();", "", "a race of a product|products in flight"),
    "another swizzle": (SEVERAL, "x_descriptor = operand", "x_descriptor = 3ull << 62 ^ operand", "elements differ"),
    "more registers than there are": (SEVERAL, "take_registers<232>", "take_registers<240>", "never come"),
    "no proxy fence before a copy": (SPLIT, "fence_shared_for_async();", "", "a race for want of a proxy fence"),
    "no arrival in the other block": (
        SHARED,
        "if (lane < SHARING) barrier",
        "if (lane < 1) barrier",
        "never come|a race",
    ),
    "a warp too few": (THREE_GROUPS, "[stage], WARPS)", "[stage], WARPS - 1)", PRODUCT_AND_COPY),
    "x not turned": (WEIGHT, '"bf16", true, "1")', '"bf16", true, "0")', "differ"),
    "x turned": (INPUT, '"bf16", false, "0")', '"bf16", false, "1")', "differ"),
    "a weight not turned": (INPUT, 'TRANSPOSE_A ", 1;', 'TRANSPOSE_A ", 0;', "differ|a race"),
    "another leading offset": (SHARED_WEIGHT, "LINES * SWIZZLE_BYTES >> 4", "8 * SWIZZLE_BYTES >> 4", "differ"),
    "another stride": (WEIGHT, "STRIDE = static_cast", "STRIDE = 2 * static_cast", "differ|a race"),
    "another step along k": (WEIGHT, "= 16 * SWIZZLE_BYTES >> 4", "= 8 * SWIZZLE_BYTES >> 4", "differ"),
    "a box in another's place": (WIDE_WEIGHT, "to + i * BOX_ELEMENTS, x_map", "to, x_map", "differ|a race"),
    "a box that is not announced": (
        SHARED_WEIGHT,
        "boxes * BOX_BYTES",
        "(boxes - 1) * BOX_BYTES",
        "a race|arrivals|copy",
    ),
    "a box too few": (SHARED_WEIGHT, "if (box >= boxes) break;", "if (box >= boxes - 1) break;", "never come"),
    "no proxy fence before a product": (ATTEND, SYNCHRONIZE, SYNCHRONIZE.split("\n")[1], "for want of a proxy fence"),
    "no barrier before a product": (ATTEND, SYNCHRONIZE, SYNCHRONIZE.split("\n")[0], "a race"),
    "queries not swizzled": (ATTEND, "(segment % 8 ^ m % 8)", "(segment % 8)", "elements differ"),
    "registers in flight": (
        ATTEND,
        RELEASE_KEYS,
        f"own.round_weights(); {RELEASE_KEYS}",
        "in flight reads were changed",
    ),
    "values released too early": (ATTEND, RELEASE_VALUES, RELEASED_EARLY, PRODUCT_AND_COPY),
    "no wgmma.fence": (ATTEND, f"wgmma_fence();\n    {NEXT_KEYS}", NEXT_KEYS, "without wgmma.fence"),
}


@pytest.mark.parametrize("fault", some_of(HOPPER_FAULTS))
def test_a_fault_on_sm_90a_is_found(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is reported with its place."""
    monkeypatch.setenv("EMULATED_RACES", "1")
    run, old, new, message = HOPPER_FAULTS[fault]
    ops = broken(old, new, folder, "90a", multiprocessors=4)
    with emulated_tensor_maps(), pytest.raises((EmulationError, AssertionError), match=message):
        run(ops)
