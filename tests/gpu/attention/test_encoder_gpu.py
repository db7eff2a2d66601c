"""The encoder's operations and whole embedding runners on CUDA against the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.errors import TesseraError
from tessera.engine.models.config import load_config
from tessera.engine.models.pooling import PoolingConfig
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.runner.embedding_runner import DecoderEmbeddingRunner, EncoderRunner
from tessera.engine.runner.head import ClassifierHead
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.runner.scorer import Scorer
from tessera.engine.tensor import CPU, float32, from_numpy
from tests.engine.golden.embedders import golden, minilm
from tests.gpu.conftest import NoTransfers
from tests.support.cases.op_cases import DTYPES, poisoned, random_angles, random_array
from tests.support.decoder_harness import relative_error
from tests.support.models.tiny_classifiers import WITH_HEADS, build_classifier, pair
from tests.support.models.tiny_encoder import build_encoder, inputs
from tests.support.models.tiny_models import TINY_MODELS, build, prompt
from tests.support.paths import GOLDEN
from tests.support.references.reference import assert_close

__all__ = ["golden", "minilm"]

pytestmark = pytest.mark.gpu

LENGTHS = [[1], [7], [8, 9], [33, 1, 32, 31, 64], [512, 5, 300], [1] * 300]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 8), (12, 32), (3, 20), (4, 64), (2, 128), (2, 33)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_bidirectional_attention(
    lengths: list[int],
    heads: tuple[int, int],
    dtype: np.dtype[Any],
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
    no_transfers: NoTransfers,
) -> None:
    num_heads, head_dim = heads
    qkv = random_array(1, (sum(lengths), 3 * num_heads * head_dim), dtype)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    arguments = {"num_heads": num_heads, "scale": head_dim**-0.5}
    expected = cpu_ops.bidirectional_attention(from_numpy(qkv, CPU), from_numpy(bounds, CPU), max(lengths), **arguments)
    device = cuda_ops.device
    out = poisoned(expected.shape, dtype, device)
    device_qkv, device_bounds = from_numpy(qkv, device), from_numpy(bounds, device)
    with no_transfers():
        cuda_ops.bidirectional_attention(device_qkv, device_bounds, max(lengths), out=out, **arguments)
    assert_close(out.numpy(), expected.numpy(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(3, 20), (2, 128)], ids=str)
@pytest.mark.parametrize(("rotated", "reach"), [(1.0, None), (1.0, 64), (0.5, 5), (None, 0), (None, 31)], ids=str)
@pytest.mark.parametrize("lengths", [[1], [33, 1, 32, 150], [512, 5, 300]], ids=lambda lengths: f"{max(lengths)}")
def test_local_and_rotated_attention(
    lengths: list[int],
    rotated: float | None,
    reach: int | None,
    heads: tuple[int, int],
    dtype: np.dtype[Any],
    cuda_ops: CudaOps,
    cpu_ops: CpuOps,
    no_transfers: NoTransfers,
) -> None:
    """`rotated`: the part of a head's elements that are."""
    num_heads, head_dim = heads
    qkv = random_array(1, (sum(lengths), 3 * num_heads * head_dim), dtype)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    tables = [] if rotated is None else [random_angles(max(lengths), int(head_dim * rotated))]
    results = []
    for ops in (cpu_ops, cuda_ops):
        device_qkv, device_bounds, *cos_sin = (from_numpy(array, ops.device) for array in (qkv, bounds, *tables))
        out = poisoned((sum(lengths), num_heads * head_dim), dtype, ops.device)
        with no_transfers():
            ops.bidirectional_attention(
                device_qkv,
                device_bounds,
                max(lengths),
                num_heads=num_heads,
                scale=head_dim**-0.5,
                cos_sin=next(iter(cos_sin), None),
                reach=reach,
                out=out,
            )
        results.append(out.numpy())
    assert_close(results[1], results[0], dtype)


def test_heads_that_are_too_large_are_refused(cuda_ops: CudaOps) -> None:
    qkv = from_numpy(random_array(1, (4, 3 * 160)), cuda_ops.device)
    bounds = from_numpy(np.array([0, 4], np.int32), cuda_ops.device)
    with pytest.raises(TesseraError, match="at most 128 elements, not 160"):
        cuda_ops.bidirectional_attention(qkv, bounds, 4, num_heads=1, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 7, 384, 1030])
def test_segment_mean(
    hidden: int, dtype: np.dtype[Any], cuda_ops: CudaOps, cpu_ops: CpuOps, no_transfers: NoTransfers
) -> None:
    x = random_array(3, (600, hidden), dtype)
    begins, ends = np.array([0, 599, 3, 88], np.int32), np.array([600, 600, 9, 89], np.int32)
    expected = cpu_ops.segment_mean(*(from_numpy(array, CPU) for array in (x, begins, ends)))
    device = cuda_ops.device
    out = poisoned(expected.shape, float32, device)
    cuda_x, cuda_begins, cuda_ends = (from_numpy(array, device) for array in (x, begins, ends))
    with no_transfers():
        cuda_ops.segment_mean(cuda_x, cuda_begins, cuda_ends, out=out)
    assert np.allclose(out.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)


def encoder(folder: Path, ops: CudaOps | CpuOps, dtype: Any) -> EncoderRunner:
    kind = "cpu" if isinstance(ops, CpuOps) else "cuda"
    config = EngineConfig(model=str(folder), dtype=dtype, max_num_batched_tokens=1024, max_num_seqs=64)
    return EncoderRunner(config.with_device_defaults(kind), load_config(folder), folder, ops.device, ops)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 5e-3), ("bfloat16", 3e-2)])
def test_encoder(dtype: Any, tolerance: float, tmp_path: Path, cuda_ops: CudaOps, cpu_ops: CpuOps) -> None:
    folder = build_encoder(tmp_path)
    texts = inputs() * 4
    expected = encoder(folder, cpu_ops, "float32").compute(texts)
    runner = encoder(folder, cuda_ops, dtype)
    found = runner.compute(texts)
    assert relative_error(found, expected) < tolerance
    alone = np.concatenate([runner.compute([token_ids]) for token_ids in inputs()])
    assert relative_error(alone, expected[: len(alone)]) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("name", WITH_HEADS)
def test_classifiers(name: str, dtype: Any, tolerance: float, tmp_path: Path, cuda_ops: CudaOps) -> None:
    """Vectors and logits of a pair against those of Hugging Face transformers."""
    folder = build_classifier(name, tmp_path)
    (token_ids, first_length), spec = pair(), load_config(folder).classifier
    runner = encoder(folder, cuda_ops, dtype)
    assert spec is not None
    assert runner.classifier is not None
    scorer = Scorer(runner, ClassifierHead(spec, runner.classifier), spec.pooling)
    logits = scorer.compute([[5], token_ids, [9] * 60], [1, first_length, 60])[1]
    mean = runner.pooled([token_ids], [first_length], "mean")[0]
    with np.load(GOLDEN / "golden_scores.npz") as golden:
        assert relative_error(mean, golden[f"{name}/vectors"].mean(axis=0)) < tolerance
        assert np.abs(logits - golden[f"{name}/logits"]).max() < tolerance


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_minilm(dtype: Any, minilm: Path, golden: dict[str, Any], cuda_ops: CudaOps) -> None:
    runner = encoder(minilm, cuda_ops, dtype)
    assert dtype != "auto" or runner.dtype == "float16"
    token_ids = [golden[f"minilm/ids/{index}"].tolist() for index in range(len(golden["minilm"]))]
    assert (runner.compute(token_ids) * golden["minilm"]).sum(axis=1).min() >= 0.9999


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_decoder(name: str, kind: Any, tmp_path: Path, golden: dict[str, Any], cuda_ops: CudaOps) -> None:
    folder = build(TINY_MODELS[name], tmp_path)
    config = EngineConfig(model=str(folder), dtype="float32", num_kv_blocks=16, max_model_len=64)
    runner = ModelRunner(config, load_config(folder), cuda_ops.device, cuda_ops)
    embedding = DecoderEmbeddingRunner(
        runner.decoder,
        runner.buffers,
        PoolingConfig(kind, None),
        max_model_len=64,
        max_num_tokens=runner.max_num_tokens,
        max_num_seqs=runner.config.max_num_seqs,
        block_size=runner.block_size,
    )
    hidden = golden[name]
    row = hidden.mean(axis=0) if kind == "mean" else hidden[-1]
    found = embedding.compute([[5], prompt(), [6, 7, 8]])
    assert relative_error(found[1], row / np.linalg.norm(row)) < 1e-3
