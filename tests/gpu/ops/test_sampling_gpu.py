"""The sampling kernels against the NumPy implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cpu.philox import keys_of_seeds, philox4x32_10
from tessera.engine.ops.cuda import sampling
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import CPU, Device, Tensor, from_numpy
from tests.gpu.conftest import NoTransfers
from tests.gpu.ops.sampled import Array, sample, varied_logits, varied_settings
from tests.support.cases.sampling_cases import (
    KEPT,
    N_SIGMA,
    SlotTables,
    int32s,
    kept_tokens,
    log_of,
    make_rows,
    make_state,
    slots_of,
    softmax,
    tokens_of_slices,
    within_n_sigma,
)

if TYPE_CHECKING:
    from tessera.engine.cuda.device import CudaDevice
    from tessera.engine.ops.cuda import CudaOps


SEED = 20261121


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


pytestmark = pytest.mark.gpu

VOCAB_SIZES = (1, 2, 31, 512, 32000, 151936)
ROWS = (0, 1, 3, 64)
SCORE_TOLERANCE = 1e-4


def only(probabilities: list[float], ids: set[int]) -> list[float]:
    """Zeros in the places of all other ids."""
    return [p if i in ids else 0.0 for i, p in enumerate(probabilities)]


def assert_sound_choice(token: int, best: int, logits: Array, parameters: Tensor, row: int) -> None:
    """Another token than the CPU's is right only within rounding: of its score, or of the filters' limits."""
    assert 0 <= token < len(logits)
    own = parameters.numpy()[row]
    temperature, top_p, min_p = (float(own[name]) for name in ("temperature", "top_p", "min_p"))
    top_k = int(own["top_k"])
    probabilities = softmax(logits, temperature).tolist()
    near, certain = (within_n_sigma(logits, float(own["top_n_sigma"]), slack=slack) for slack in (1e-5, -1e-5))
    assert token in near & kept_tokens(only(probabilities, near), top_k, top_p, min_p, slack=1e-5)
    groups = np.arange((len(logits) + 3) // 4)
    counter = np.zeros((len(groups), 4), np.uint32)
    counter[:, 0] = groups
    counter[:, 1] = own["position"]
    words = philox4x32_10(counter, keys_of_seeds(own["seed"])).reshape(-1)[: len(logits)]
    noise = -np.log(-np.log(((words >> 9) + 0.5) * 2.0**-23))
    scores = (logits.astype(np.float64) - float(logits.max())) / temperature + noise
    certain &= kept_tokens(only(probabilities, certain), top_k, top_p, min_p, slack=-1e-5)
    assert scores[token] >= scores[sorted(certain)].max() - SCORE_TOLERANCE
    print(f"row {row}: {token} instead of {best}, within rounding")


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("filtered", [False, True])
def test_samples_as_numpy(
    cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator, vocab_size: int, rows: int, filtered: bool
) -> None:
    logits = varied_logits(rng, rows, vocab_size)
    settings = varied_settings(rng, rows)
    if not filtered:
        settings = {name: settings[name] for name in ("seed", "position", "temperature")}
    expected = sample(CpuOps(), logits, CPU, filtered, **settings)
    tokens = sample(cuda_ops, logits, cuda_device, filtered, **settings)
    assert tokens.shape == (rows,)
    parameters = make_rows(CPU, rows, **settings)
    for i in np.flatnonzero(tokens != expected):
        assert_sound_choice(int(tokens[i]), int(expected[i]), logits[i], parameters, int(i))


def test_filters_of_a_large_flat_row(cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator) -> None:
    """More candidates than the kernel lists in shared memory."""
    rows, vocab_size = 9, 151936
    logits = rng.normal(0, 0.5, (rows, vocab_size)).astype(np.float32)
    logits[-1] = 2.5
    settings = {
        "seed": np.arange(rows),
        "top_k": [0, 50000, 100000, 0, 4096, 4097, 150000, 1, 77],
        "top_p": [0.9, 1.0, 0.8, 0.999, 1.0, 1.0, 0.9, 0.5, 0.5],
        "min_p": [0.0, 0.0, 0.001, 0.1, 0.0, 0.0, 0.1, 0.0, 0.0],
    }
    expected = sample(CpuOps(), logits, CPU, True, **settings)
    tokens = sample(cuda_ops, logits, cuda_device, True, **settings)
    parameters = make_rows(CPU, rows, **settings)
    for i in np.flatnonzero(tokens != expected):
        assert_sound_choice(int(tokens[i]), int(expected[i]), logits[i], parameters, int(i))


def test_a_crowd_far_behind_is_filtered_within(
    cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator
) -> None:
    """Tokens beyond 16 nats, of which one weighs nothing and all together a hundredth."""
    row = rng.uniform(-16.5, -16.05, 151936).astype(np.float32)
    row[rng.integers(len(row))] = 0
    # Where one of the crowd would be chosen without filters.
    positions = [264, 273, 314, 454, 597, 834, 1146, 1229, 1231, 1272, 1317, 1408, 1480, 1491, 1550, 1575, 1644, 1702]
    filters: dict[str, list[float]] = {
        "top_p": [0.9945, 0.998, 1.0, 1.0, 0.997],
        "top_k": [0, 0, 0, 100000, 50000],
        "min_p": [0.0, 0.0, float(np.exp(-16.2)), 0.0, 0.0],
    }
    logits = np.tile(row, (len(positions) * 5, 1))
    settings = {name: np.tile(values, len(positions)) for name, values in filters.items()}
    settings["position"] = np.repeat(positions, 5)
    expected = sample(CpuOps(), logits, CPU, True, **settings)
    for kept in (row[expected] < -16).reshape(-1, 5).sum(axis=0):
        assert 1 < kept < len(positions) - 1, "a filter parts the crowd"
    np.testing.assert_array_equal(sample(cuda_ops, logits, cuda_device, True, **settings), expected)


@pytest.mark.parametrize(("probabilities", "settings", "kept"), [c[1:] for c in KEPT], ids=[c[0] for c in KEPT])
def test_kept_tokens(
    cuda_ops: CudaOps, cuda_device: CudaDevice, probabilities: list[float], settings: dict[str, Any], kept: set[int]
) -> None:
    logits = np.tile(log_of(probabilities), (600, 1))
    tokens = sample(cuda_ops, logits, cuda_device, True, position=np.arange(600), **settings)
    assert set(tokens.tolist()) == kept


@pytest.mark.parametrize(("logits", "settings", "kept"), [c[1:] for c in N_SIGMA], ids=[c[0] for c in N_SIGMA])
def test_top_n_sigma(
    cuda_ops: CudaOps, cuda_device: CudaDevice, logits: list[float], settings: dict[str, Any], kept: set[int]
) -> None:
    rows = np.tile(np.array(logits, np.float32), (300, 1))
    tokens = sample(cuda_ops, rows, cuda_device, True, position=np.arange(300), **settings)
    assert set(tokens.tolist()) == kept


@pytest.mark.parametrize("vocab_size", [31, 32000, 151936])
def test_top_n_sigma_is_numpys(
    cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator, vocab_size: int
) -> None:
    """Its limit is a whole number of steps that does not depend on the order of a sum, so it is the same exactly."""
    rows = 21
    logits = varied_logits(rng, rows, vocab_size)
    settings = {"seed": np.arange(rows), "temperature": 1.5, "top_n_sigma": np.linspace(0.1, 4.0, rows)}
    expected = sample(CpuOps(), logits, CPU, True, **settings)
    assert (sample(cuda_ops, logits, cuda_device, True, **settings) == expected).all()


@pytest.mark.parametrize("vocab_size", [31, 32000])
def test_a_row_alone_chooses_as_in_any_batch(
    cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator, vocab_size: int
) -> None:
    rows = 130  # split otherwise than one row
    logits = varied_logits(rng, rows, vocab_size)
    settings = varied_settings(rng, rows)
    together = sample(cuda_ops, logits, cuda_device, True, **settings)
    assert (sample(cuda_ops, logits, cuda_device, True, **settings) == together).all()
    for i in range(0, rows, 7):
        alone = {name: values[i] for name, values in settings.items()}
        assert sample(cuda_ops, logits[[i]], cuda_device, True, **alone).tolist() == [together[i]]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("filtered", [False, True])
def test_one_block_chooses_as_a_cluster(
    cuda_ops: CudaOps,
    cuda_device: CudaDevice,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    vocab_size: int,
    filtered: bool,
) -> None:
    """What GPUs without clusters run gives the same tokens."""
    for kernel in sampling.instantiations(()):
        cuda_device.compile([kernel])  # later there would be no shared memory
    rows = 21
    logits = varied_logits(rng, rows, vocab_size)
    settings = varied_settings(rng, rows)
    if not filtered:
        settings = {name: settings[name] for name in ("seed", "position", "temperature")}
    expected = sample(cuda_ops, logits, cuda_device, filtered, **settings)
    monkeypatch.setattr(cuda_device, "max_shared_bytes", 0)
    assert (sample(cuda_ops, logits, cuda_device, filtered, **settings) == expected).all()


def test_a_graph_chooses_from_what_the_logits_have_become(
    cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator
) -> None:
    """Adjusted, chosen and recorded twice a graph, by kernels that overlap."""
    rows, vocab_size = 5, 32000
    settings = varied_settings(rng, rows) | {"presence_penalty": 0.5, "repetition_penalty": 1.3}
    parameters = make_rows(cuda_device, rows, **settings)
    state = make_state(cuda_device, [SlotTables({3: 1.0}, [])] * rows, vocab_size)
    tensors = [from_numpy(np.zeros((rows, vocab_size), np.float32), cuda_device) for _ in range(2)]
    outs = [int32s(cuda_device, np.full(rows, -7)) for _ in range(2)]
    slots = slots_of(parameters)

    def run() -> None:
        for logits, out in zip(tensors, outs, strict=True):
            cuda_ops.adjust_logits(logits, state, parameters)
            cuda_ops.sample(logits, parameters, filtered=True, out=out)
            cuda_ops.record_tokens(state, slots, out)

    run()
    with cuda_device.capture() as finish:
        run()
    graph = finish()
    for _ in range(3):
        before = state.token_state.numpy()
        values = [varied_logits(rng, rows, vocab_size) for _ in range(2)]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.upload(value)
        graph.launch()
        cuda_device.synchronize()
        chosen = [out.numpy() for out in outs]
        state.token_state.upload(before)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.upload(value)
        run()
        for tokens, out in zip(chosen, outs, strict=True):
            assert tokens.tolist() == out.numpy().tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [50, 32000])
def test_rows_without_a_finite_maximum_fail_alone(
    cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator, temperature: float, vocab_size: int
) -> None:
    logits = rng.normal(0, 1, (6, vocab_size)).astype(np.float32)
    settings = {"seed": np.arange(6), "temperature": temperature, "top_p": 0.9}
    sound = sample(cuda_ops, logits, cuda_device, True, **settings)
    logits[1, -1] = np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    logits[4, 0] = -np.nan
    tokens = sample(cuda_ops, logits, cuda_device, True, **settings)
    assert tokens.tolist() == [sound[0], -1, -1, -1, -1, sound[5]]


def test_greedy_takes_the_lowest_of_the_best(cuda_ops: CudaOps, cuda_device: CudaDevice) -> None:
    logits = np.array([[1, 3, 3, 2], [-5, -6, -5, -7], [-0.0, 0.0, -1, 0], [-np.inf, -np.inf, -1e38, -np.inf]])
    tokens = sample(cuda_ops, logits.astype(np.float32), cuda_device, False, temperature=0.0)
    assert tokens.tolist() == [1, 0, 0, 2]


def test_padding_rows_are_left_out(cuda_ops: CudaOps, cuda_device: CudaDevice) -> None:
    parameters = make_rows(
        cuda_device, 3, slot=[0, -1, 1], temperature=[0.0, 0.0, 1.0], min_tokens=5, presence_penalty=1.0
    )
    logits = from_numpy(np.array([[1, 2], [3, 4], [-np.inf, 5]], np.float32), cuda_device)
    state = make_state(cuda_device, [SlotTables({}, [])] * 2, 2)
    tokens = cuda_ops.sample(logits, parameters, filtered=True)
    assert tokens.numpy().tolist() == [1, -1, 1]
    before = state.token_state.numpy().copy()
    cuda_ops.record_tokens(state, slots_of(parameters), tokens)
    assert (state.token_state.numpy() - before).tolist() == [[0, 1], [0, 1]]
    cuda_ops.adjust_logits(logits, state, parameters)
    assert logits.numpy()[1].tolist() == [3, 4]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_state_and_adjustment_as_numpy(
    cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator, vocab_size: int, rows: int
) -> None:
    num_slots = rows + 2
    tables = []
    for _ in range(num_slots):
        ids = rng.permutation(vocab_size)
        bias = {int(i): float(v) for i, v in zip(ids[:9], rng.normal(0, 20, 9), strict=False)}
        tables.append(SlotTables(bias, [int(i) for i in ids[6:12]]))
    prompts = [rng.integers(-1, vocab_size + 1, rng.integers(0, 3000)) for _ in range(num_slots)]
    outputs = [rng.integers(-1, min(vocab_size, 50) + 1, rng.integers(0, 1000)) for _ in range(num_slots)]
    settings: dict[str, Any] = {
        "slot": rng.permutation(num_slots)[:rows],
        "num_output_tokens": rng.integers(0, 4, rows),
        "min_tokens": rng.integers(0, 4, rows),
        "repetition_penalty": rng.choice(np.array([1.0, 0.5, 1.7], np.float32), rows),
        "presence_penalty": rng.choice(np.array([0.0, -1.5, 2.0], np.float32), rows),
        "frequency_penalty": rng.choice(np.array([0.0, 0.25, -2.0], np.float32), rows),
    }
    logits = rng.normal(0, 5, (rows, vocab_size)).astype(np.float32)
    token_ids = rng.integers(-1, vocab_size, rows)

    states, adjusted = [], []
    implementations: list[tuple[Ops, Device]] = [(CpuOps(), CPU), (cuda_ops, cuda_device)]
    for ops, device in implementations:
        state = make_state(device, tables, vocab_size)
        for slot in range(num_slots):
            ops.reset_slot(state, slot, int32s(device, prompts[slot]), int32s(device, outputs[slot]))
        parameters = make_rows(device, rows, **settings)
        tensor = from_numpy(logits, device)
        ops.adjust_logits(tensor, state, parameters)
        ops.record_tokens(state, slots_of(parameters), int32s(device, token_ids))
        states.append(state.token_state.numpy())
        adjusted.append(tensor.numpy())
    assert (states[0] == states[1]).all()
    np.testing.assert_allclose(adjusted[1], adjusted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [0, 1, 20, 64, 65])
def test_logprobs_as_numpy(
    cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator, vocab_size: int, rows: int, k: int
) -> None:
    k = min(k, vocab_size)
    logits = varied_logits(rng, rows, vocab_size)
    token_ids = rng.integers(0, vocab_size, rows)
    expected = CpuOps().top_logprobs(from_numpy(logits, CPU), int32s(CPU, token_ids), k)
    results = cuda_ops.top_logprobs(from_numpy(logits, cuda_device), int32s(cuda_device, token_ids), k)
    for result, reference in zip(results, expected, strict=True):
        assert result.shape == reference.shape
        if result.dtype == np.int32:
            assert (result.numpy() == reference.numpy()).all()
        else:
            np.testing.assert_allclose(result.numpy(), reference.numpy(), rtol=1e-5, atol=1e-5)


def test_logprobs_of_the_whole_vocabulary(cuda_ops: CudaOps, cuda_device: CudaDevice, rng: np.random.Generator) -> None:
    rows, vocab_size = 2, 32000
    logits = varied_logits(rng, rows, vocab_size)
    ids = int32s(cuda_device, np.zeros(rows, np.int32))
    _, _, top_ids, top_logprobs = cuda_ops.top_logprobs(from_numpy(logits, cuda_device), ids, vocab_size)
    expected = CpuOps().top_logprobs(from_numpy(logits, CPU), int32s(CPU, np.zeros(rows, np.int32)), vocab_size)
    assert (top_ids.numpy() == expected[2].numpy()).all()
    np.testing.assert_allclose(top_logprobs.numpy(), expected[3].numpy(), rtol=1e-5, atol=1e-5)


def test_logprobs_survive_rows_that_failed(cuda_ops: CudaOps, cuda_device: CudaDevice) -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[0] = np.nan
    logits[1] = -np.inf
    logits[2, 0] = np.nan
    results = cuda_ops.top_logprobs(from_numpy(logits, cuda_device), int32s(cuda_device, [-1, -1, 8, 5]), 8)
    chosen, rank, top_ids, top_logprobs = (result.numpy() for result in results)
    assert np.isnan(chosen[:3]).all()
    assert rank.tolist() == [0, 0, 0, 1]
    assert top_ids[3].tolist() == list(range(8))
    np.testing.assert_allclose(top_logprobs[3], -np.log(8), rtol=1e-6)


def test_nothing_crosses_between_host_and_device(
    cuda_ops: CudaOps, cuda_device: CudaDevice, no_transfers: NoTransfers
) -> None:
    parameters = make_rows(cuda_device, 2, top_k=3, min_tokens=1)
    state = make_state(cuda_device, [SlotTables({3: 1.0}, [4])] * 2, 100)
    logits = from_numpy(np.zeros((2, 100), np.float32), cuda_device)
    prompt, output, slots = int32s(cuda_device, [1, 2]), int32s(cuda_device, []), slots_of(parameters)
    with no_transfers():
        cuda_ops.reset_slot(state, 1, prompt, output)
        cuda_ops.adjust_logits(logits, state, parameters)
        tokens = cuda_ops.sample(logits, parameters, filtered=True)
        cuda_ops.record_tokens(state, slots, tokens)
        cuda_ops.top_logprobs(logits, tokens, 5)


@pytest.mark.parametrize(("vocab_size", "bounds"), [(101, [0, 44, 48, 101]), (32001, [0, 16000, 32001])])
def test_tokens_of_slices_are_those_of_the_whole(
    cuda_ops: CudaOps, rng: np.random.Generator, vocab_size: int, bounds: list[int]
) -> None:
    """By chance and without, on the CPU and here; one row has NaN, and one is padding."""
    logits = varied_logits(rng, 10, vocab_size)
    logits[3, vocab_size - 1] = np.nan
    temperatures, slots = [0.0, 1.0, 0.7, 1.0, 0.0] * 2, [*range(9), -1]

    def rows(device: Device) -> Tensor:
        return make_rows(device, 10, temperature=temperatures, seed=np.arange(10), slot=slots)

    found = tokens_of_slices(cuda_ops, logits, bounds, rows(cuda_ops.device))
    assert found[3] == found[9] == -1
    whole = cuda_ops.sample(from_numpy(logits, cuda_ops.device), rows(cuda_ops.device), filtered=False)
    assert found.tolist() == whole.numpy().tolist()
    assert found.tolist() == tokens_of_slices(CpuOps(), logits, bounds, rows(CPU)).tolist()
