"""Whole models on the GPU: the golden logits, the stories, and that a forward stays on the device."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import TesseraError
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import PackedFormat
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.dummy import dummy_weights
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.weights import MoEWeights
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, bfloat16, float16, float32, from_numpy
from tests.engine.gguf.converter import plain, write_converted
from tests.engine.gguf.writer import Stored
from tests.support.cases.gguf_blocks import random_blocks
from tests.support.cases.quantisers import SCHEMES, fp8, quantised_model
from tests.support.decoder_harness import (
    DecoderHarness,
    Row,
    logits_with_and_without_the_last_layers_rest,
    relative_error,
    scattered_blocks,
    step_batch,
)
from tests.support.models import tiny_families
from tests.support.models.tiny_families import FAMILIES, build_family
from tests.support.models.tiny_mixtures import TINY_MIXTURES
from tests.support.models.tiny_models import PROMPT_LEN, TINY_MODELS, build, prompt
from tests.support.paths import GOLDEN

pytestmark = pytest.mark.gpu

GOLDEN_FILE = GOLDEN / "golden_logits.npz"
TOLERANCE = {float32: 1e-4, bfloat16: 2e-2, float16: 2e-2}
BLOCK_SIZE = 16
MODEST: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.2,
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray[Any, Any]]:
    with np.load(GOLDEN_FILE) as file:
        return dict(file)


@pytest.mark.parametrize("chunks", [None, [7, 1, 16, 9, 7], [1] * PROMPT_LEN], ids=["whole", "chunks", "decode"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_golden_logits(
    name: str,
    dtype: np.dtype[Any],
    chunks: list[int] | None,
    tmp_path: Path,
    cuda_ops: CudaOps,
    golden: dict[str, np.ndarray[Any, Any]],
) -> None:
    model = TINY_MODELS[name]
    made = DecoderHarness.of(build(model, tmp_path), cuda_ops, dtype, max_model_len=model.max_model_len)
    logits = made.logits(prompt(), chunks)[golden["positions"]]
    if name in TINY_MIXTURES and dtype != float32:
        # Where two experts are nearly even, 16 bits may choose the other one: most tokens have the same experts.
        errors = [relative_error(row, expected) for row, expected in zip(logits, golden[name], strict=True)]
        assert np.median(errors) < TOLERANCE[dtype]
    else:
        assert relative_error(logits, golden[name]) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "qwen2moe", "gptoss-mxfp4"])
def test_no_transfer_inside_a_forward(name: str, tmp_path: Path, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
    made = DecoderHarness.of(build(TINY_MODELS[name], tmp_path), cuda_ops, bfloat16, max_model_len=64)
    for tokens in (prompt(), prompt()[:1]):
        inputs = made.step_inputs(tokens, 0, scattered_blocks(8))
        made.decoder.forward(*inputs, made.buffers)  # compiles what is not compiled yet
        cuda_device.synchronize()
        before = (vars(cuda_device.transfers).copy(), cuda_device.pool_statistics.in_use)
        logits = made.decoder.forward(*inputs, made.buffers)
        cuda_device.synchronize()
        assert (vars(cuda_device.transfers), cuda_device.pool_statistics.in_use) == before
        assert np.isfinite(logits.numpy()).all()
        assert vars(cuda_device.transfers) != before[0], "the counter counts"


def test_inputs_on_two_devices_are_refused(tmp_path: Path, cuda_ops: CudaOps) -> None:
    made = DecoderHarness.of(build(TINY_MODELS["llama"], tmp_path), cuda_ops, bfloat16, max_model_len=64)
    _, metadata, indices = made.step_inputs([5], 0, scattered_blocks(8))
    with pytest.raises(TesseraError, match="ids is on cpu, but this operation runs on cuda:0"):
        made.decoder.forward(from_numpy(np.array([5], np.int32), CPU), metadata, indices, made.buffers)


def test_dummy_weights_are_deterministic_and_those_of_the_cpu(tmp_path: Path, cuda_ops: CudaOps) -> None:
    config = load_config(build(TINY_MODELS["qwen3"], tmp_path))
    one, same, other = (dummy_weights(config, bfloat16, cuda_ops, seed=seed) for seed in (1, 1, 2))
    on_cpu = dummy_weights(config, bfloat16, make_ops(CPU), seed=1)
    for first, second, third in zip(one.tensors(), same.tensors(), on_cpu.tensors(), strict=True):
        assert np.array_equal(first.numpy(), second.numpy())
        assert relative_error(first.numpy(), third.numpy().astype(np.float64)) < 1e-2
    weights = [next(each.layers[0].attention.qkv.tensors()).numpy() for each in (one, other)]
    assert not np.array_equal(weights[0], weights[1])


def make_runner(folder: Path, device: CudaDevice, ops: CudaOps, **settings: Any) -> ModelRunner:
    config = EngineConfig(model=str(folder), **{**MODEST, **settings})
    return ModelRunner(config, load_config(folder), device, ops)


def generate(runner: ModelRunner, rows: list[Row], count: int) -> None:
    for _ in range(count):
        result = runner.execute(step_batch(rows, BLOCK_SIZE))
        for row, token_id in zip(rows, result.token_ids.tolist(), strict=True):
            row.output.append(token_id)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_last_layer_need_not_compute_what_no_logits_need(
    name: str, dtype: np.dtype[Any], tmp_path: Path, cuda_device: CudaDevice, cuda_ops: CudaOps
) -> None:
    folder = build(TINY_MODELS[name], tmp_path)
    settings: dict[str, Any] = {"dtype": dtype.name, "max_model_len": 64, "max_num_seqs": 4, "num_kv_blocks": 64}
    runner = make_runner(folder, cuda_device, cuda_ops, enforce_eager=True, **settings)
    for whole, last in logits_with_and_without_the_last_layers_rest(runner):
        assert relative_error(last, whole) < TOLERANCE[dtype]


@pytest.mark.shared
def test_both_stories_alone_and_together(shared_models: Path, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
    folder = shared_models / "stories260K"
    cases = json.loads((folder / "greedy_ref.json").read_text())["cases"]
    runner = make_runner(folder, cuda_device, cuda_ops, dtype="float32", num_kv_blocks=64)
    greedy = SamplingParams(max_tokens=120, temperature=0.0)

    def rows() -> list[Row]:
        return [
            Row(slot=slot, blocks=scattered_blocks(16, first=16 * slot), prompt=case["prompt_ids"], params=greedy)
            for slot, case in enumerate(cases)
        ]

    together = rows()
    generate(runner, together, 120)
    for alone, row, case in zip(rows(), together, cases, strict=True):
        generate(runner, [alone], 120)
        assert alone.output == row.output == case["greedy_ids"]


def test_a_plain_step_uploads_once_and_downloads_once(
    tmp_path: Path, cuda_device: CudaDevice, cuda_ops: CudaOps
) -> None:
    runner = make_runner(build(TINY_MODELS["llama"], tmp_path), cuda_device, cuda_ops, num_kv_blocks=16)
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    rows = [Row(slot=0, blocks=scattered_blocks(4), prompt=prompt()[:9], params=greedy)]
    generate(runner, rows, 1)
    before = vars(cuda_device.transfers).copy()
    generate(runner, rows, 3)
    after = vars(cuda_device.transfers)
    assert after["uploads"] - before["uploads"] == 3
    assert after["downloads"] - before["downloads"] == 3


def test_sampling_and_logprobs_agree_with_the_cpu(tmp_path: Path, cuda_device: CudaDevice, cuda_ops: CudaOps) -> None:
    folder = build(TINY_MODELS["llama"], tmp_path)
    settings = [
        SamplingParams(max_tokens=9, temperature=0.0, logprobs=3),
        SamplingParams(max_tokens=9, temperature=1.0, seed=4, top_p=0.9, logprobs=0, logprob_token_ids=(9, 2)),
        SamplingParams(max_tokens=9, temperature=0.8, seed=5, top_k=7, repetition_penalty=1.4, min_tokens=4),
        SamplingParams(max_tokens=9, temperature=0.0, logit_bias={9: 20.0, 8: 19.0}, presence_penalty=1.5),
    ]
    outputs = []
    for device, ops in ((cuda_device, cuda_ops), (CPU, make_ops(CPU))):
        config = EngineConfig(model=str(folder), **{**MODEST, "num_kv_blocks": 16}, dtype="float32")
        runner = ModelRunner(config, load_config(folder), device, ops)
        rows = [
            Row(slot=slot, blocks=scattered_blocks(4, first=4 * slot), prompt=prompt()[slot : slot + 9], params=params)
            for slot, params in enumerate(settings)
        ]
        rows[2].suppressed = (2, 3)
        logprobs = []
        for _ in range(6):
            result = runner.execute(step_batch(rows, BLOCK_SIZE))
            assert result.logprobs is not None
            for found in result.logprobs[:2]:
                assert found is not None
                logprobs += [found.logprob, *found.top_logprobs]
            for row, token_id in zip(rows, result.token_ids.tolist(), strict=True):
                row.output.append(token_id)
        outputs.append(([row.output for row in rows], logprobs))
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1] == pytest.approx(outputs[1][1], abs=1e-4)


def test_the_kv_cache_takes_its_share_of_the_memory(
    tmp_path: Path, cuda_device: CudaDevice, cuda_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what this process has of the device: other tests may come and go on it meanwhile."""

    def taken() -> int:
        return cuda_device.pool_statistics.in_use + cuda_device.pool_statistics.cached

    monkeypatch.setattr(CudaDevice, "free_memory", lambda device: device.total_memory - taken())
    llama = TINY_MODELS["llama"].config
    folder = tmp_path / "wide"
    folder.mkdir()
    sizes = {"max_position_embeddings": 2**16, "num_hidden_layers": 32, "head_dim": 128, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps({**llama, **sizes}))
    runner = make_runner(folder, cuda_device, cuda_ops, load_format="dummy", max_num_seqs=64)
    share = int(0.2 * cuda_device.total_memory)
    assert 0.98 * share < taken() < 1.01 * share
    assert runner.kv_cache_bytes > 0.5 * share


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_golden_logits_of_families(name: str, dtype: np.dtype[Any], tmp_path: Path, cuda_ops: CudaOps) -> None:
    made = DecoderHarness.of(build_family(name, tmp_path), cuda_ops, dtype, max_model_len=tiny_families.MAX_LEN)
    with np.load(GOLDEN / "golden_families.npz") as golden:
        expected = golden[name]
    for chunks in (None, [7, 1, 1, tiny_families.LENGTH - 9]):
        logits = made.logits(tiny_families.prompt(), chunks)[list(tiny_families.POSITIONS), : tiny_families.VOCAB]
        assert relative_error(logits, expected) < (1e-4 if dtype == float32 else 5e-2)


def quantised_mixture(form: str, folder: Path) -> Path:
    """A checkpoint of AWQ or FP8, or a GGUF file."""
    routers = ("lm_head", "mlp.gate")
    if form == "awq":
        return quantised_model(folder, SCHEMES["awq"], "qwen3moe", plain=routers)[0]
    if form == "fp8":
        blocks = {**SCHEMES["deepseek"].config, "weight_block_size": [32, 128]}
        scheme = replace(
            SCHEMES["deepseek"], config=blocks, pack=partial(fp8, block=(32, 128), name="weight_scale_inv")
        )
        return quantised_model(folder, scheme, "qwen3moe", plain=routers)[0]
    model = replace(
        TINY_MODELS["qwen3moe"],
        config={**TINY_MODELS["qwen3moe"].config, "hidden_size": 256, "moe_intermediate_size": 256},
    )
    rng = np.random.default_rng(7)

    def store(name: str, values: np.ndarray[Any, Any]) -> Stored:
        if "_exps" not in name:
            return plain(name, values)
        return Stored(form, values.shape, random_blocks(form, values.size, rng).tobytes())

    return write_converted(folder / "m.gguf", model, store)


@pytest.mark.parametrize("form", ["awq", "fp8", "Q4_K"])
def test_quantised_experts_are_those_of_the_cpu_small(form: str, tmp_path: Path, cuda_ops: CudaOps) -> None:
    """In the order of the kernels, and with the same logits where no activations are rounded."""
    path = quantised_mixture(form, tmp_path)
    loaded = [load_weights(path, load_config(path), bfloat16, ops) for ops in (make_ops(CPU), cuda_ops)]
    for expected, found in zip(*(weights.layers for weights in loaded), strict=True):
        assert isinstance(expected.mlp, MoEWeights)
        assert isinstance(found.mlp, MoEWeights)
        for one, other in ((expected.mlp.up, found.mlp.up), (expected.mlp.down, found.mlp.down)):
            assert isinstance(other.parts[0].format, PackedFormat)
            numbers = [
                part.format.dequantize({name: t.numpy() for name, t in part.tensors.items()}, slice(None))
                for part in (*one.parts, *other.parts)
            ]
            np.testing.assert_allclose(numbers[1][:, : one.shape[1]], numbers[0], rtol=1e-4)
    if form != "fp8":
        made = [DecoderHarness.of(path, ops, float32, max_model_len=64) for ops in (make_ops(CPU), cuda_ops)]
        assert relative_error(made[1].logits(prompt()), made[0].logits(prompt())) < 1e-3
