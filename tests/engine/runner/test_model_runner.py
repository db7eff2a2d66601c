"""ModelRunner: a step's batch in, token ids and log-probabilities out; and what it decides at the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import ConfigError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.prefill_budget import DecodeReads
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import KVFormat
from tessera.engine.models.config import load_config, parse_config
from tessera.engine.models.kv_cache import block_bytes
from tessera.engine.ops.make import make_ops
from tessera.engine.runner import model_runner
from tessera.engine.runner.model_runner import ModelRunner, resolve_dtype
from tessera.engine.tensor import Buffer, CpuDevice, float32
from tests.support.decoder_harness import (
    DecoderHarness,
    Row,
    logits_with_and_without_the_last_layers_rest,
    relative_error,
    scattered_blocks,
    step_batch,
)
from tests.support.models.tiny_models import TINY_MODELS, VOCAB_SIZE, build, prompt

BLOCK_SIZE: Final = 8
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> DecoderHarness:
    return DecoderHarness.of(folder, make_ops(CpuDevice()), float32, max_model_len=64)


@pytest.fixture
def make_runner(folder: Path) -> MakeRunner:
    def make(device: CpuDevice | None = None, **settings: Any) -> ModelRunner:
        config = EngineConfig(model=str(folder), **{"block_size": BLOCK_SIZE, "max_num_seqs": 4, **settings})
        device = device or CpuDevice()
        return ModelRunner(config, load_config(folder), device, make_ops(device))

    return make


def row(slot: int, tokens: list[int], **params: Any) -> Row:
    settings = SamplingParams(**{"max_tokens": 64, "temperature": 0.0, **params})
    return Row(slot=slot, blocks=scattered_blocks(8, first=8 * slot), prompt=tokens, params=settings)


def step(runner: ModelRunner, rows: list[Row], num_scheduled: list[int] | None = None) -> list[int]:
    """Run one step, append what was sampled, return it."""
    batch = step_batch(rows, BLOCK_SIZE, num_scheduled)
    token_ids = runner.execute(batch).token_ids.tolist()
    for done, token_id in zip([r for r in rows if r.num_computed == len(r.tokens)], token_ids, strict=True):
        done.output.append(token_id)
    return token_ids


def generate(runner: ModelRunner, rows: list[Row], count: int) -> list[list[int]]:
    for _ in range(count):
        step(runner, rows)
    return [r.output for r in rows]


def last_logits(reference: DecoderHarness, tokens: list[int]) -> np.ndarray[Any, Any]:
    return np.asarray(reference.logits(tokens)[-1], np.float64)


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


# -- steps ----------------------------------------------------------------------------------------


def test_greedy_tokens_are_the_largest_logits(make_runner: MakeRunner, reference: DecoderHarness) -> None:
    one = row(0, prompt()[:9])
    generate(make_runner(), [one], 12)
    for length in range(12):
        assert one.output[length] == last_logits(reference, one.prompt + one.output[:length]).argmax()


def test_a_mixed_batch_gives_each_sequence_what_it_gives_alone(make_runner: MakeRunner) -> None:
    """Prefill chunks and decoding in the same steps, sequences joining while others run."""
    starts = [prompt()[:17], prompt()[5:8], prompt()[::-1][:30]]
    settings = [{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}, {"temperature": 0.7, "seed": 6, "top_k": 20}]
    alone = []
    for start, params in zip(starts, settings, strict=True):
        [tokens] = generate(make_runner(), [row(0, start, **params)], 8)
        alone.append(tokens)
    runner = make_runner()
    rows = [row(slot, start, **params) for slot, (start, params) in enumerate(zip(starts, settings, strict=True))]
    assert len(step(runner, rows[:2], [10, 3])) == 1
    assert len(step(runner, rows, [7, 1, 12])) == 2
    assert len(step(runner, rows, [1, 1, 18])) == 3
    generate(runner, rows, 5)
    for r, tokens in zip(rows, alone, strict=True):
        assert r.output == tokens[: len(r.output)]
        assert len(r.output) >= 6


def test_a_step_that_samples_nothing(make_runner: MakeRunner) -> None:
    result = make_runner().execute(step_batch([row(0, prompt()[:20])], BLOCK_SIZE, [10]))
    assert result.token_ids.shape == (0,)
    assert result.logprobs is None


def test_results_stay_when_the_next_step_runs(make_runner: MakeRunner) -> None:
    runner = make_runner()
    first = runner.execute(step_batch([row(0, prompt()[:5])], BLOCK_SIZE)).token_ids
    kept = first.copy()
    for length in range(6, 12):
        runner.execute(step_batch([row(1, prompt()[:length])], BLOCK_SIZE))
    assert np.array_equal(first, kept)


def test_fault_nan_logits_fail_their_row_alone(make_runner: MakeRunner) -> None:
    runner = make_runner()
    healthy = [row(0, prompt()[:9], logprobs=1), row(2, prompt()[3:9])]
    expected = generate(make_runner(), [row(0, prompt()[:9]), row(2, prompt()[3:9])], 1)
    poisoned_id = 1  # not in any prompt
    next(runner.decoder.weights.embedding.tensors()).numpy()[poisoned_id] = np.nan
    rows = [healthy[0], row(1, [5, poisoned_id, 6], logprobs=2), healthy[1]]
    result = runner.execute(step_batch(rows, BLOCK_SIZE))
    assert result.token_ids.tolist() == [expected[0][0], -1, expected[1][0]]
    assert result.logprobs is not None
    assert result.logprobs[0] is not None
    assert result.logprobs[1:] == [None, None]


# -- adjustments ----------------------------------------------------------------------------------

FEW_TOKENS = dict.fromkeys(range(10, 16), 12.0)  # a bias by which a sequence keeps to these, and so repeats itself


def test_logit_bias_forces_and_forbids(make_runner: MakeRunner) -> None:
    runner = make_runner()
    assert generate(runner, [row(0, prompt()[:9], logit_bias={77: 100.0})], 3) == [[77] * 3]
    [plain] = generate(make_runner(), [row(0, prompt()[:9])], 1)
    [banned] = generate(make_runner(), [row(0, prompt()[:9], logit_bias={plain[0]: -100.0})], 1)
    assert banned != plain


def test_end_ids_are_suppressed_until_min_tokens(make_runner: MakeRunner) -> None:
    one = row(0, prompt()[:9], logit_bias={2: 90.0}, min_tokens=3)
    one.suppressed = (2, 5)
    generate(make_runner(), [one], 5)
    assert 2 not in one.output[:3]
    assert one.output[3:] == [2, 2]


def test_a_slot_forgets_its_last_sequence(make_runner: MakeRunner) -> None:
    """Bias, suppressed ids and counts of a slot's last sequence do not reach the next one."""
    runner = make_runner()
    bystander = row(1, prompt()[:4], frequency_penalty=0.5)  # keeps adjustment switched on
    first = row(0, prompt()[:9], logit_bias={77: 100.0}, min_tokens=30, presence_penalty=2.0)
    first.suppressed = tuple(range(60))
    generate(runner, [first, bystander], 4)
    for params in (
        {},
        {"min_tokens": 6},
        {"frequency_penalty": 1.0, "logit_bias": FEW_TOKENS},
        {"frequency_penalty": 1.0},
    ):
        second = row(0, prompt()[:9], **params)
        generate(runner, [second, bystander], 6)
        assert [second.output] == generate(make_runner(), [row(0, prompt()[:9], **params)], 6)


def test_penalties_count_prompt_and_output(make_runner: MakeRunner, reference: DecoderHarness) -> None:
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.8, "frequency_penalty": 0.6}
    start = [*prompt()[:6], 10, 11, 12]
    one = row(0, start, logit_bias=FEW_TOKENS, **params)
    generate(make_runner(), [one], 14)
    assert one.output != generate(make_runner(), [row(0, start, logit_bias=FEW_TOKENS)], 14)[0]
    for length, chosen in enumerate(one.output):
        logits = last_logits(reference, one.prompt + one.output[:length])
        logits[list(FEW_TOKENS)] += 12.0
        seen = sorted({*one.prompt, *one.output[:length]})
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
        counts = np.bincount(one.output[:length], minlength=VOCAB_SIZE)
        logits -= 0.6 * counts + 0.8 * (counts > 0)
        assert chosen == logits.argmax()


def test_counts_survive_preemption(make_runner: MakeRunner) -> None:
    """A sequence that comes back with its output recomputed goes on as if it had never left."""
    params = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": FEW_TOKENS}
    [undisturbed] = generate(make_runner(), [row(0, prompt()[:9], **params)], 12)
    runner = make_runner()
    one = row(0, prompt()[:9], **params)
    generate(runner, [one], 6)
    back = row(3, one.prompt, **params)
    back.output = list(one.output)
    generate(runner, [row(0, prompt()[2:7], **params)], 3)
    generate(runner, [back], 6)
    assert back.output == undisturbed
    forgetful = row(3, one.prompt + one.output[:6], **params)
    assert generate(make_runner(), [forgetful], 6)[0] != undisturbed[6:], "the counts matter here"


# -- log-probabilities ----------------------------------------------------------------------------


def test_logprobs_are_the_models_own(make_runner: MakeRunner, reference: DecoderHarness) -> None:
    """Before bias, penalties and temperature, whatever those made of the choice."""
    runner = make_runner()
    changed = {"logit_bias": {77: 100.0}, "repetition_penalty": 1.5, "temperature": 0.5, "seed": 3}
    rows = [
        row(0, prompt()[:9], logprobs=4),
        row(1, prompt()[:6]),
        row(2, prompt()[:12], logprobs=2, **changed),
        row(3, prompt()[:3], logprobs=0),
    ]
    result = runner.execute(step_batch(rows, BLOCK_SIZE))
    assert result.logprobs is not None
    assert result.logprobs[1] is None
    for index, count in ((0, 4), (2, 2), (3, 0)):
        found = result.logprobs[index]
        expected = log_softmax(last_logits(reference, rows[index].prompt))
        order = np.argsort(-expected)
        assert found is not None
        assert found.token_id == result.token_ids[index]
        assert found.logprob == pytest.approx(expected[found.token_id], abs=1e-4)
        assert order[found.rank - 1] == found.token_id
        assert found.top_token_ids == order[:count].tolist()
        assert found.top_logprobs == pytest.approx(expected[order[:count]], abs=1e-4)
    assert result.logprobs[2] is not None
    assert result.logprobs[2].token_id == 77
    assert result.logprobs[0] is not None
    assert result.logprobs[0].rank == 1


def test_logprobs_of_named_ids(make_runner: MakeRunner, reference: DecoderHarness) -> None:
    """In the order of the request, beside rows with other ids, with the most probable tokens, and with nothing."""
    runner = make_runner()
    rows = [
        row(0, prompt()[:9], logprobs=0, logprob_token_ids=(5, 90, 3)),
        row(1, prompt()[:6]),
        row(2, prompt()[:12], logprobs=2),
        row(3, prompt()[:3], logprobs=0, logprob_token_ids=(7,), temperature=1.0, seed=2),
    ]
    for _ in range(2):
        result = runner.execute(step_batch(rows, BLOCK_SIZE))
        assert result.logprobs is not None
        for index, named in ((0, [5, 90, 3]), (3, [7])):
            found = result.logprobs[index]
            expected = log_softmax(last_logits(reference, rows[index].tokens))
            assert found is not None
            assert found.logprob == pytest.approx(expected[found.token_id], abs=1e-4)
            assert found.top_token_ids == named
            assert found.top_logprobs == pytest.approx(expected[named], abs=1e-4)
        assert result.logprobs[1] is None
        best = log_softmax(last_logits(reference, rows[2].tokens))
        assert result.logprobs[2] is not None
        assert result.logprobs[2].top_token_ids == np.argsort(-best)[:2].tolist()
        for each, token_id in zip(rows, result.token_ids.tolist(), strict=True):
            each.output.append(token_id)
    later = [row(0, prompt()[:9], logprobs=1)]  # the slot's next sequence names none
    result = runner.execute(step_batch(later, BLOCK_SIZE))
    assert result.logprobs is not None
    assert result.logprobs[0] is not None
    assert len(result.logprobs[0].top_token_ids) == 1


def test_logprobs_without_adjustment_take_the_logits_themselves(
    make_runner: MakeRunner, reference: DecoderHarness
) -> None:
    rows = [row(0, prompt()[:9], logprobs=1), row(1, prompt()[:6], logprobs=3)]
    result = make_runner().execute(step_batch(rows, BLOCK_SIZE))
    assert result.logprobs is not None
    for one, found in zip(rows, result.logprobs, strict=True):
        assert found is not None
        assert found.logprob == pytest.approx(log_softmax(last_logits(reference, one.prompt)).max(), abs=1e-4)
        assert found.top_token_ids[0] == found.token_id


# -- what crosses between host and device ---------------------------------------------------------


class CountingDevice(CpuDevice):
    def __init__(self) -> None:
        self.uploads = self.allocations = 0

    def upload(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        self.uploads += 1
        super().upload(pointer, array)

    def allocate(self, nbytes: int) -> Buffer:
        self.allocations += 1
        return super().allocate(nbytes)


def test_a_step_uploads_once_and_allocates_nothing(make_runner: MakeRunner) -> None:
    device = CountingDevice()
    runner = make_runner(device)
    rows = [row(0, prompt()[:9]), row(1, prompt()[:5], temperature=0.8, seed=4)]
    generate(runner, rows, 1)  # their block tables are news
    before = device.allocations, device.uploads
    generate(runner, rows, 5)
    assert (device.allocations - before[0], device.uploads - before[1]) == (0, 5)


# -- the start ------------------------------------------------------------------------------------


def test_warming_up_leaves_no_trace(make_runner: MakeRunner) -> None:
    runner = make_runner()
    one = row(0, prompt()[:9], frequency_penalty=1.0, logit_bias=FEW_TOKENS)
    expected = generate(make_runner(), [row(0, one.prompt, frequency_penalty=1.0, logit_bias=FEW_TOKENS)], 8)
    generate(runner, [one], 4)
    runner.warm_up()
    assert generate(runner, [one], 4) == expected


def test_what_it_reports(make_runner: MakeRunner) -> None:
    runner = make_runner(num_kv_blocks=12)
    assert (runner.num_kv_blocks, runner.block_size, runner.max_model_len) == (12, BLOCK_SIZE, 64)
    assert runner.dtype == "float32"
    assert runner.kv_cache_bytes == 12 * 2 * 3 * 2 * BLOCK_SIZE * 16 * 4
    assert runner.weight_bytes == runner.num_parameters * 4
    assert runner.decode_reads == DecodeReads(cached_token=2 * 3 * 2 * 16 * 4 / runner.weight_bytes)


@pytest.mark.parametrize(("max_model_len", "unbounded"), [(8, 3), (64, 2)])
def test_of_longer_sequences_layers_with_a_window_read_no_more(
    max_model_len: int, unbounded: int, tmp_path: Path
) -> None:
    """The window of one of three layers has eight tokens."""
    folder, device = build(TINY_MODELS["ministral-pattern"], tmp_path), CpuDevice()
    config = EngineConfig(model=str(folder), block_size=8, max_model_len=max_model_len)
    runner = ModelRunner(config, load_config(folder), device, make_ops(device))
    of_all = runner.block_bytes / 8 / runner.weight_bytes
    assert runner.decode_reads.cached_token == pytest.approx(unbounded / 3 * of_all)


def test_of_a_mixture_few_decodes_read_few_experts(tmp_path: Path) -> None:
    model = TINY_MODELS["qwen3moe"]
    folder, device = build(model, tmp_path), CpuDevice()
    runner = ModelRunner(EngineConfig(model=str(folder)), load_config(folder), device, make_ops(device))
    reads, config = runner.decode_reads, model.config
    layers, hidden, inner = (config[name] for name in ("num_hidden_layers", "hidden_size", "moe_intermediate_size"))
    of_experts = layers * config["num_experts"] * 3 * hidden * inner * 4
    assert reads.experts == pytest.approx(of_experts / runner.weight_bytes)
    assert reads.experts_per_chosen == config["num_experts"] / config["num_experts_per_tok"]
    assert reads.of(1, 0) == pytest.approx(1 - reads.experts * (1 - 1 / reads.experts_per_chosen))
    assert reads.of(1, 0) < reads.of(8, 0) < reads.of(100, 0) == pytest.approx(1.0)
    assert reads.of(8, 100) == pytest.approx(reads.of(8, 0) + 100 * reads.cached_token)


def test_progress_names_its_stage(folder: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    device = CpuDevice()
    config = EngineConfig(model=str(folder))
    runner = ModelRunner(config, load_config(folder), device, make_ops(device), lambda *call: calls.append(call))
    assert {stage for stage, _, _ in calls} == {"weights"}
    assert calls[-1][1:] == (runner.weight_bytes, runner.weight_bytes)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_dtype_on_the_cpu(make_runner: MakeRunner, asked: str, expected: str) -> None:
    runner = make_runner(dtype=asked)
    assert runner.dtype == expected
    assert {tensor.dtype.name for tensor in runner.decoder.weights.tensors()} == {expected}
    assert generate(runner, [row(0, prompt()[:5])], 2)


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        ("auto", "float16", "float16"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float32", "bfloat16"),
        ("auto", None, "bfloat16"),
        ("float32", "float16", "float32"),
        ("float16", "float32", "float16"),
    ],
)
def test_dtype_on_other_devices(asked: str, stored: str | None, expected: str) -> None:
    elsewhere: Any = object()
    model = parse_config({**TINY_MODELS["llama"].config, "torch_dtype": stored}, {})
    assert resolve_dtype(EngineConfig(model="x", dtype=asked), model, elsewhere).name == expected  # type: ignore[arg-type]


def test_kv_cache_is_no_larger_than_asked_nor_than_useful(make_runner: MakeRunner, folder: Path) -> None:
    per_block = block_bytes(load_config(folder), BLOCK_SIZE, KVFormat(float32))
    gib = 20.5 * per_block / 2**30
    with pytest.raises(ConfigError, match="cpu-kv-cache-gib must"):
        EngineConfig(model="x", cpu_kv_cache_gib=gib / 100).verify()
    assert make_runner(cpu_kv_cache_gib=gib).num_kv_blocks == 20
    assert make_runner(cpu_kv_cache_gib=1.0).num_kv_blocks == 4 * 64 // BLOCK_SIZE


def test_a_kv_cache_too_small_for_one_sequence_says_what_fits(make_runner: MakeRunner, folder: Path) -> None:
    per_block = block_bytes(load_config(folder), BLOCK_SIZE, KVFormat(float32))
    gib = 5.5 * per_block / 2**30
    with pytest.raises(ConfigError, match=r"40 tokens .* one sequence may have 64: pass --max-model-len 40 or less"):
        make_runner(cpu_kv_cache_gib=gib)
    assert make_runner(cpu_kv_cache_gib=gib, max_model_len=40).max_model_len == 40


def test_the_models_own_length_gives_way_to_what_memory_holds(
    make_runner: MakeRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.engine.runner.model_runner.MIN_DERIVED_LEN", 16)
    gib = 5.5 * block_bytes(load_config(folder), BLOCK_SIZE, KVFormat(float32)) / 2**30
    assert make_runner(cpu_kv_cache_gib=gib).max_model_len == 40
    with pytest.raises(ConfigError, match="one sequence may have 64"):
        make_runner(cpu_kv_cache_gib=gib, max_model_len=64)


def test_max_model_len_beyond_the_model_is_refused(make_runner: MakeRunner, folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 65 is beyond the 64 positions"):
        make_runner(max_model_len=65)


def test_dummy_weights_need_no_weight_files(tmp_path: Path) -> None:
    folder = build(TINY_MODELS["qwen3"], tmp_path)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    tokens = []
    for seed in (1, 1, 2):
        device = CpuDevice()
        config = EngineConfig(model=str(folder), load_format="dummy", seed=seed, block_size=BLOCK_SIZE)
        runner = ModelRunner(config, load_config(folder), device, make_ops(device))
        tokens += generate(runner, [row(0, prompt()[:9])], 10)
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("name", ["gpt2", "phi3-longrope-long", "smollm3"])
def test_other_architectures_run_too(name: str, tmp_path: Path) -> None:
    folder = build(TINY_MODELS[name], tmp_path)
    device = CpuDevice()
    config = EngineConfig(model=str(folder), block_size=BLOCK_SIZE, max_model_len=64)
    runner = ModelRunner(config, load_config(folder), device, make_ops(device))
    reference = DecoderHarness.of(folder, make_ops(device), float32, max_model_len=64)
    one = row(0, prompt()[:9])
    one.rope_row = runner.short_rope_len
    generate(runner, [one], 6)
    for length in range(6):
        assert one.output[length] == last_logits(reference, one.prompt + one.output[:length]).argmax()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_last_layer_need_not_compute_what_no_logits_need(name: str, tmp_path: Path) -> None:
    folder = build(TINY_MODELS[name], tmp_path)
    config = EngineConfig(model=str(folder), block_size=BLOCK_SIZE, max_num_seqs=4, max_model_len=64)
    device = CpuDevice()
    runner = ModelRunner(config, load_config(folder), device, make_ops(device))
    for whole, last in logits_with_and_without_the_last_layers_rest(runner):
        assert relative_error(last, whole) < 1e-5


@pytest.mark.parametrize(("beside_others", "left"), [(False, 10), (True, 40)])
def test_a_share_beside_other_engines_is_this_engines_own(
    monkeypatch: pytest.MonkeyPatch, beside_others: bool, left: int
) -> None:
    """Of 100 bytes 30 were in use before; this engine has taken 20 of its share of 60 since."""
    device = object.__new__(CudaDevice)
    free = [70]
    monkeypatch.setattr(CudaDevice, "total_memory", 100, raising=False)
    monkeypatch.setattr(CudaDevice, "free_memory", lambda self: free[0])
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(CudaDevice, name, lambda self: None)
    before = model_runner._used_memory(device) if beside_others else 0
    free[0] = 50
    assert model_runner._free_of_share(device, 0.6) + before == left
