"""Encoders, pooling and decoders' embeddings against Hugging Face transformers (tests/golden)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.app.text.tokenizer import load_tokenizer
from tessera.engine.contract.config import EngineConfig, PoolingName
from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.models.config import load_config, parse_config
from tessera.engine.models.pooling import PoolingConfig, load_pooling
from tessera.engine.ops.cpu import CpuOps
from tessera.engine.ops.cuda.encoder import QUERIES, attention_config, segment_mean_config
from tessera.engine.ops.make import make_ops
from tessera.engine.runner.embedding_runner import DecoderEmbeddingRunner, unit_length
from tessera.engine.runner.model_runner import ModelRunner
from tessera.engine.tensor import CPU, Tensor, float32, from_numpy
from tests.engine.golden.embedders import Array, decoder, encoder, golden, minilm
from tests.support.cases.embedding_texts import TEXTS
from tests.support.cases.op_cases import DTYPES, poisoned, random_angles, random_array
from tests.support.decoder_harness import relative_error
from tests.support.models.tiny_encoder import (
    CONFIG,
    INPUT_LENGTHS,
    MAX_LENGTH,
    build_encoder,
    inputs,
    tensors,
    write_pooling,
)
from tests.support.models.tiny_models import TINY_MODELS, build, prompt, write_safetensors
from tests.support.references.reference import assert_close

__all__ = ["golden", "minilm"]

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


def pooled(hidden: Array, kind: str) -> Array:
    row = {"mean": hidden.mean(axis=0), "last": hidden[-1], "cls": hidden[0]}[kind]
    return row / np.linalg.norm(row)


# -- operations -----------------------------------------------------------------------------------


def attention_reference(
    qkv: Array,
    lengths: list[int],
    num_heads: int,
    scale: float,
    cos_sin: Array | None = None,
    reach: int | None = None,
) -> Array:
    """softmax(q k^T * scale) v in float64, written as its formula."""
    width = qkv.shape[1] // 3
    head_dim = width // num_heads
    out = np.zeros((len(qkv), width))
    start = 0
    for length in lengths:
        text = qkv[start : start + length].astype(np.float64)
        for head in range(num_heads):
            q, k, v = (text[:, part * width + head * head_dim :][:, :head_dim] for part in range(3))
            if cos_sin is not None:
                q, k = (turned(part, cos_sin[:length]).astype(qkv.dtype).astype(np.float64) for part in (q, k))
            weights = np.exp(q @ k.T * scale)
            if reach is not None:
                weights[np.abs(np.subtract.outer(np.arange(length), np.arange(length))) > reach] = 0
            out[start : start + length, head * head_dim : (head + 1) * head_dim] = (
                weights / weights.sum(axis=1, keepdims=True) @ v
            )
        start += length
    return out


def turned(heads: Array, cos_sin: Array) -> Array:
    """The pairs (i, i + half) of heads [T, D] as complex numbers, each turned by its angle."""
    half = cos_sin.shape[1] // 2
    pairs = (heads[:, :half] + 1j * heads[:, half : 2 * half]) * (cos_sin[:, :half] + 1j * cos_sin[:, half:])
    return np.concatenate([pairs.real, pairs.imag, heads[:, 2 * half :]], axis=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "num_heads", "head_dim"), [([1], 1, 8), ([5, 1, 40, 33], 4, 16), ([70], 3, 20)])
def test_bidirectional_attention(lengths: list[int], num_heads: int, head_dim: int, dtype: np.dtype[Any]) -> None:
    qkv = random_array(1, (sum(lengths), 3 * num_heads * head_dim), dtype)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    out = poisoned((len(qkv), num_heads * head_dim), dtype, CPU)
    CpuOps().bidirectional_attention(
        from_numpy(qkv, CPU), from_numpy(bounds, CPU), max(lengths), num_heads=num_heads, scale=0.3, out=out
    )
    assert_close(out.numpy(), attention_reference(qkv, lengths, num_heads, 0.3), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reach", [None, 0, 5, 64, 200])
@pytest.mark.parametrize("rotary_dim", [None, 8, 16])
def test_local_and_rotated_attention(rotary_dim: int | None, reach: int | None, dtype: np.dtype[Any]) -> None:
    lengths = [5, 1, 150, 33]
    qkv = random_array(1, (sum(lengths), 3 * 4 * 16), dtype)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    cos_sin = None if rotary_dim is None else random_angles(150, rotary_dim)
    found = CpuOps().bidirectional_attention(
        from_numpy(qkv, CPU),
        from_numpy(bounds, CPU),
        max(lengths),
        num_heads=4,
        scale=0.3,
        cos_sin=None if cos_sin is None else from_numpy(cos_sin, CPU),
        reach=reach,
    )
    assert_close(found.numpy(), attention_reference(qkv, lengths, 4, 0.3, cos_sin, reach), dtype)


def test_attention_of_a_long_text_in_pieces_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, bounds = from_numpy(random_array(2, (50, 24)), CPU), from_numpy(np.array([0, 50], np.int32), CPU)

    def attend() -> Array:
        result: Tensor = CpuOps().bidirectional_attention(qkv, bounds, 50, num_heads=2, scale=0.5)
        return result.numpy()

    whole = attend()
    monkeypatch.setattr("tessera.engine.ops.cpu.encoder.SCORE_ELEMENTS", 700)
    assert np.allclose(attend(), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_segment_mean(dtype: np.dtype[Any]) -> None:
    x = random_array(3, (20, 7), dtype)
    begins, ends = np.array([0, 19, 3], np.int32), np.array([20, 20, 9], np.int32)
    out = poisoned((3, 7), float32, CPU)
    CpuOps().segment_mean(from_numpy(x, CPU), from_numpy(begins, CPU), from_numpy(ends, CPU), out=out)
    expected = [x[begin:end].astype(np.float64).mean(axis=0) for begin, end in zip(begins, ends, strict=True)]
    assert np.allclose(out.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_unit_length() -> None:
    rows = np.array([[3, 4], [0, 0], [np.nan, 1], [np.inf, 1], [1e-30, 0]], np.float32)
    found = unit_length(rows)
    assert np.allclose(found[0], [0.6, 0.8])
    assert np.array_equal(found[1], [0, 0])
    assert not np.isfinite(found[2:4]).all(axis=1).any()
    assert np.allclose(found[4], [1, 0])


# -- encoders -------------------------------------------------------------------------------------


def test_the_encoder_is_the_one_the_golden_vectors_were_made_from(tmp_path: Path, golden: dict[str, Array]) -> None:
    digest = hashlib.sha256()
    for path in sorted(build_encoder(tmp_path / "encoder").iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert golden["encoder/sha256"].tobytes() == digest.digest(), "run tests/golden/make_golden_embeddings.py again"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
def test_encoder_matches(kind: PoolingName, dtype: Any, tmp_path: Path, golden: dict[str, Array]) -> None:
    runner = encoder(build_encoder(tmp_path), pooling=kind, dtype=dtype)
    expected = np.array([pooled(golden[f"encoder/{index}"], kind) for index in range(len(INPUT_LENGTHS))])
    assert relative_error(runner.compute(inputs()), expected) < TOLERANCE[dtype]


def test_a_text_is_embedded_alike_whatever_it_is_batched_with(tmp_path: Path) -> None:
    runner = encoder(build_encoder(tmp_path))
    together = runner.compute(inputs()[::-1])[::-1]
    alone = np.concatenate([runner.compute([token_ids]) for token_ids in inputs()])
    assert np.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "gelu_new"}, {"layer_norm_eps": 1e-3}, {"num_attention_heads": 2}], ids=str
)
def test_golden_vectors_tell_variants_apart(changes: dict[str, Any], tmp_path: Path, golden: dict[str, Array]) -> None:
    runner = encoder(build_encoder(tmp_path, **changes), pooling="mean", dtype="float32")
    expected = np.array([pooled(golden[f"encoder/{index}"], "mean") for index in range(len(INPUT_LENGTHS))])
    assert relative_error(runner.compute(inputs()), expected) > 5 * TOLERANCE["float32"]


def test_a_checkpoint_with_outer_names_and_heads_is_read(tmp_path: Path) -> None:
    plain = encoder(build_encoder(tmp_path / "plain"))
    folder = build_encoder(tmp_path / "prefixed")
    extra = {"cls.predictions.bias": np.zeros(4, np.float32), "bert.embeddings.position_ids": np.zeros(4, np.float32)}
    named = {"bert." + name: tensor for name, tensor in tensors().items()}
    write_safetensors(folder / "model.safetensors", {**named, **extra})
    assert np.array_equal(encoder(folder).compute(inputs()), plain.compute(inputs()))


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path)
    (folder / "model.safetensors").unlink()
    vectors = encoder(folder, load_format="dummy", seed=3).compute(inputs())
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be"),
        ({"is_decoder": True}, "is_decoder must be false"),
        ({"type_vocab_size": 0}, "type_vocab_size must be an integer from 1"),
        ({"hidden_act": "silu"}, "hidden_act must be one of"),
        ({"hidden_size": 1024}, "heads have at most 128"),
        ({"matryoshka_dimensions": [16, 64]}, "matryoshka_dimensions must be a list of integers from 1 to 48"),
        ({"matryoshka_dimensions": "all"}, "matryoshka_dimensions must be a list"),
    ],
    ids=str,
)
def test_what_an_encoder_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config({**CONFIG, **changes}, {})


def test_matryoshka_dimensions() -> None:
    assert parse_config(CONFIG, {}).matryoshka_dimensions is None
    assert parse_config({**CONFIG, "matryoshka_dimensions": [32, 16]}, {}).matryoshka_dimensions == (16, 32, 48)
    assert parse_config({**CONFIG, "is_matryoshka": True}, {}).matryoshka_dimensions == tuple(range(1, 49))


def test_the_length_limit(tmp_path: Path) -> None:
    folder = build_encoder(tmp_path)
    assert encoder(folder).max_input_tokens == MAX_LENGTH
    assert encoder(folder, max_num_batched_tokens=40, max_num_seqs=1).max_input_tokens == 40
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    assert encoder(folder).max_input_tokens == 32
    assert encoder(folder, max_model_len=50).max_input_tokens == 50
    with pytest.raises(ConfigError, match="--max-model-len 65 is beyond the 64 positions"):
        encoder(folder, max_model_len=65)


# -- the real MiniLM ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_minilm_matches(dtype: Any, minilm: Path, golden: dict[str, Array]) -> None:
    tokenizer = load_tokenizer(minilm)
    token_ids = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    assert token_ids == [golden[f"minilm/ids/{index}"].tolist() for index in range(len(TEXTS))]
    runner = encoder(minilm, dtype=dtype)
    assert (runner.pooling, runner.dimension, runner.max_input_tokens) == ("mean", 384, 256)
    cosines = (runner.compute(token_ids) * golden["minilm"]).sum(axis=1)
    assert cosines.min() >= 0.9999


# -- pooling --------------------------------------------------------------------------------------


def test_pooling_is_what_the_folder_says_unless_chosen(tmp_path: Path) -> None:
    assert load_pooling(tmp_path, "auto", "last") == PoolingConfig("last", None)
    for mode, kind in {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}.items():
        write_pooling(tmp_path, mode)
        assert load_pooling(tmp_path, "auto", "last").kind == kind
    assert load_pooling(tmp_path, "mean", "last").kind == "mean"


def test_pooling_in_the_newer_spelling(tmp_path: Path) -> None:
    write_pooling(tmp_path)
    path = tmp_path / "1_Pooling" / "config.json"
    for mode, kind in {"cls": "cls", "mean": "mean", "lasttoken": "last"}.items():
        for spelled in (mode, [mode]):
            path.write_text(json.dumps({"embedding_dimension": 48, "pooling_mode": spelled, "include_prompt": True}))
            assert load_pooling(tmp_path, "auto", "last").kind == kind
    for wrong in ("max", ["cls", "mean"], [], 3, None):
        path.write_text(json.dumps({"pooling_mode": wrong}))
        with pytest.raises(ModelError, match="pooling_mode must be one of cls, mean, lasttoken, not"):
            load_pooling(tmp_path, "auto", "mean")


@pytest.mark.parametrize(
    ("modes", "steps", "message"),
    [
        (("max_tokens",), (), "exactly one of .*pooling_mode_mean_tokens.* must be true, not pooling_mode_max_tokens"),
        (("mean_tokens", "cls_token"), (), "exactly one of"),
        ((), (), "must be true, not none"),
        (("mean_tokens",), ("Dense",), 'a step of type "Dense" is not supported'),
    ],
    ids=str,
)
def test_pooling_that_is_not_supported_is_refused(
    modes: tuple[str, ...], steps: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write_pooling(tmp_path, *modes, steps=steps)
    with pytest.raises(ModelError, match=message):
        load_pooling(tmp_path, "auto", "mean")


@pytest.mark.parametrize("path", ["..", "/etc", "../other", "a/b", 3, ".hidden"])
def test_a_pooling_folder_is_inside_the_model(path: Any, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": path, "type": "x.Pooling"}]))
    with pytest.raises(ModelError, match="must be a folder's name"):
        load_pooling(tmp_path, "auto", "mean")


@pytest.mark.parametrize("text", ["{", "{}", "[" * 100_000, "null"])
def test_broken_modules_are_a_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        load_pooling(tmp_path, "auto", "mean")


# -- decoders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mean", "last", "cls"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_decoder_matches(name: str, kind: PoolingName, tmp_path: Path, golden: dict[str, Array]) -> None:
    runner = decoder(build(TINY_MODELS[name], tmp_path), kind, max_model_len=64)
    found = runner.compute([prompt()[:3], prompt(), [5]])
    assert relative_error(found[1], pooled(golden[name], kind)) < 1e-4
    assert np.allclose(
        found, np.concatenate([runner.compute([ids]) for ids in (prompt()[:3], prompt(), [5])]), atol=1e-5
    )


def test_a_decoder_saved_without_its_head_is_read(tmp_path: Path) -> None:
    """As embedding models are: no `model.` before the names, and the head tied."""
    model = TINY_MODELS["llama"]
    tied = replace(model, config={**model.config, "tie_word_embeddings": True})
    whole = decoder(build(tied, tmp_path / "whole"), "last", max_model_len=64).compute([prompt()])
    folder = build(tied, tmp_path / "bare")
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].replace(b'"model.', b'"').rstrip()
    header += b" " * (-len(header) % 8)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    assert np.array_equal(decoder(folder, "last", max_model_len=64).compute([prompt()]), whole)


def test_embedding_leaves_generation_alone(tmp_path: Path) -> None:
    """The KV cache of generation is not touched by an embedding pass."""
    folder = build(TINY_MODELS["llama"], tmp_path)
    config = EngineConfig(model=str(folder), dtype="float32", num_kv_blocks=16, max_model_len=64)
    runner = ModelRunner(config, load_config(folder), CPU, make_ops(CPU))
    caches = [tensor for pair in runner.decoder.caches for tensor in pair]
    for index, tensor in enumerate(caches):
        tensor.upload(random_array(index, tensor.shape))
    before = [np.array(tensor.numpy()) for tensor in caches]
    embedding = DecoderEmbeddingRunner(
        runner.decoder,
        runner.buffers,
        PoolingConfig("mean", None),
        max_model_len=64,
        max_num_tokens=runner.max_num_tokens,
        max_num_seqs=8,
        block_size=runner.block_size,
    )
    embedding.compute([prompt()] * 8)
    assert all(np.array_equal(tensor.numpy(), old) for tensor, old in zip(caches, before, strict=True))


# -- launches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_seqs", [1, 1024])
@pytest.mark.parametrize("max_seqlen", [1, 8, 9, 512, 8192])
def test_attention_launch_covers_every_query(num_seqs: int, max_seqlen: int) -> None:
    config = attention_config(num_seqs, 12, max_seqlen)
    assert (config.grid[0], config.grid[2]) == (num_seqs, 12)
    assert max_seqlen <= config.grid[1] * QUERIES < max_seqlen + QUERIES
    assert config.block == (QUERIES * 32, 1, 1)


@pytest.mark.parametrize("hidden", [1, 128, 129, 4096])
def test_segment_mean_launch_covers_every_element(hidden: int) -> None:
    config = segment_mean_config(5, hidden)
    assert config.grid[0] == 5
    assert hidden <= config.grid[1] * config.block[0] < hidden + config.block[0]
