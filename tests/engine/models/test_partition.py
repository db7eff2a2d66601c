"""Ranks' shares of weights: together they are the whole, in every format, and what cannot be shared is refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.engine.contract.errors import ConfigError, ModelError
from tessera.engine.formats import LinearWeight
from tessera.engine.models.config import ModelConfig, load_config
from tessera.engine.models.partition import Partition, Rank
from tessera.engine.models.weights.build import num_weight_bytes
from tessera.engine.models.weights.dummy import dummy_weights
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.models.weights.rounding import rounded_while_loading
from tessera.engine.models.weights.weights import MoEWeights, Weights
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, float32
from tests.engine.gguf.converter import plain, write_converted
from tests.engine.gguf.quantized import QUANTIZED, Quantizer
from tests.engine.gguf.writer import Stored
from tests.support.cases.gguf_blocks import random_blocks
from tests.support.cases.quantisers import SCHEMES, fp8, quantised_model
from tests.support.models.tiny_models import TINY_MODELS, TinyModel, build

Array = np.ndarray[Any, Any]
OPS = make_ops(CPU)


def dense(weight: LinearWeight) -> Array:
    """[N, K] in the order of its input's features."""
    rows = np.concatenate(
        [
            part.format.dequantize({name: t.numpy() for name, t in part.tensors.items()}, slice(0, part.shape[0]))
            for part in weight.parts
        ]
    )[:, : weight.shape[1]]
    if weight.order is None:
        return rows
    result = np.empty_like(rows)
    result[:, weight.order.numpy()] = rows
    return result


def assert_shares_make_the_whole(config: ModelConfig, whole: Weights, shares: list[Weights]) -> None:
    """Every row and column is where `Partition` says, and all are somewhere."""
    size = len(shares)
    partitions = [Partition(config, Rank(index, size)) for index in range(size)]
    for partition, own in zip(partitions, shares, strict=True):
        tokens = slice(partition.vocabulary.start, partition.vocabulary.stop)
        assert np.array_equal(dense(own.embedding), dense(whole.embedding)[tokens])
        assert own.lm_head is not None
        assert whole.lm_head is not None
        assert np.array_equal(dense(own.lm_head), dense(whole.lm_head)[tokens])
    assert [token for partition in partitions for token in partition.vocabulary] == list(range(config.vocab_size))
    for index, layer in enumerate(whole.layers):
        qkv, out, seen = dense(layer.attention.qkv), dense(layer.attention.out), set()
        for partition, own in zip(partitions, shares, strict=True):
            rows = partition.share("qkv", index).rows
            assert np.array_equal(dense(own.layers[index].attention.qkv), qkv[rows])
            seen |= set(rows.tolist() if rows is not None else [])
        assert seen == set(range(len(qkv)))
        assert np.array_equal(np.hstack([dense(own.layers[index].attention.out) for own in shares]), out)
        biases = [own.layers[index].attention.out.bias for own in shares]
        assert all(bias is None for bias in biases[1:]), "a sum takes the bias once"
        assert (biases[0] is None) == (layer.attention.out.bias is None)
        assert_mlps_make_the_whole(layer.mlp, [own.layers[index].mlp for own in shares])


def assert_mlps_make_the_whole(whole: Any, shares: list[Any]) -> None:
    count = whole.router.shape[0] if isinstance(whole, MoEWeights) else 1
    hidden = whole.down.shape[0] // count
    parts = whole.up.shape[0] // count // whole.down.shape[1]
    down = [dense(own.down).reshape(count, hidden, -1) for own in shares]
    assert np.array_equal(np.concatenate(down, axis=2), dense(whole.down).reshape(count, hidden, -1))
    up = [dense(own.up).reshape(count, parts, -1, whole.up.shape[1]) for own in shares]
    assert np.array_equal(np.concatenate(up, axis=2), dense(whole.up).reshape(count, parts, -1, whole.up.shape[1]))
    if whole.up.bias is not None:
        biases = [own.up.bias.numpy().reshape(count, parts, -1) for own in shares]
        assert np.array_equal(np.concatenate(biases, axis=2).ravel(), whole.up.bias.numpy())


def load_shares(path: Path, config: ModelConfig, size: int) -> list[Weights]:
    return [load_weights(path, config, float32, OPS, rank=Rank(index, size)) for index in range(size)]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_shares_of_every_architecture_make_the_whole(name: str, tmp_path: Path) -> None:
    model = TINY_MODELS[name]
    if model.config.get("quantization_config"):  # whole blocks for each of four
        model = dataclasses.replace(model, config=model.config | {"intermediate_size": 128})
    path = build(model, tmp_path)
    config = load_config(path)
    whole = load_weights(path, config, float32, OPS)
    assert_shares_make_the_whole(config, whole, load_shares(path, config, 4))


@pytest.mark.parametrize("name", SCHEMES)
def test_shares_of_quantised_checkpoints_are_the_numbers_of_the_whole(name: str, tmp_path: Path) -> None:
    """Blocks, groups and scales are cut, never made anew; columns sorted by their groups cannot be."""
    base = dataclasses.replace(
        TINY_MODELS["llama"], config=TINY_MODELS["llama"].config | {"intermediate_size": 128, "head_dim": 32}
    )
    path, _ = quantised_model(tmp_path, SCHEMES[name], base)
    config = load_config(path)
    whole = load_weights(path, config, float32, OPS)
    if any(layer.mlp.down.order is not None for layer in whole.layers):
        with pytest.raises(ModelError, match=r"o_proj.*cannot be shared among so many: its columns are sorted"):
            load_shares(path, config, 2)
        return
    assert_shares_make_the_whole(config, whole, load_shares(path, config, 2))


@pytest.mark.parametrize(("name", "block_rows"), [("awq", 32), ("deepseek", 32), ("deepseek", 48)])
def test_experts_of_quantised_checkpoints_are_shared_too(name: str, block_rows: int, tmp_path: Path) -> None:
    """In whole blocks and groups of each expert."""
    sizes = {"moe_intermediate_size": 128 if block_rows == 32 else 96, "head_dim": 32}
    base = dataclasses.replace(TINY_MODELS["qwen3moe"], config=TINY_MODELS["qwen3moe"].config | sizes)
    scheme = SCHEMES[name]
    if name == "deepseek":
        blocks = {"weight_block_size": [block_rows, 16]}
        pack = partial(fp8, block=(block_rows, 16), name="weight_scale_inv")
        scheme = dataclasses.replace(scheme, config={**scheme.config, **blocks}, pack=pack)
    path, _ = quantised_model(tmp_path, scheme, base, plain=("lm_head", "mlp.gate", "self_attn"))
    config = load_config(path)
    whole = load_weights(path, config, float32, OPS)
    assert_shares_make_the_whole(config, whole, load_shares(path, config, 2))


@pytest.mark.parametrize("rounding", ["fp8", "int4"])
def test_shares_are_rounded_as_the_whole_is(rounding: Any, tmp_path: Path) -> None:
    exact = build(WIDE, tmp_path)
    config = rounded_while_loading(load_config(exact), rounding, exact)
    assert_shares_make_the_whole(config, load_weights(exact, config, float32, OPS), load_shares(exact, config, 2))


def wide(**changes: Any) -> TinyModel:
    """Heads and inner elements in whole blocks, embeddings too."""
    sizes = {"hidden_size": 256, "intermediate_size": 1536, "head_dim": 128, "num_hidden_layers": 1}
    return dataclasses.replace(TINY_MODELS["llama"], config={**TINY_MODELS["llama"].config, **sizes, **changes})


WIDE = wide()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_shares_of_gguf_are_cut_between_blocks(kind: str, tmp_path: Path) -> None:
    path = write_converted(tmp_path / "m.gguf", WIDE, Quantizer(kind))
    config = load_config(path)
    assert_shares_make_the_whole(config, load_weights(path, config, float32, OPS), load_shares(path, config, 2))


@pytest.mark.parametrize("types", [("Q8_0", "Q8_0", "Q4_0"), ("Q8_0", "Q4_0", "Q5_0")])
def test_experts_of_gguf_are_shared_too(types: tuple[str, ...], tmp_path: Path) -> None:
    """Each of them, gate and up in one type or two."""
    sizes = {"moe_intermediate_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    model = dataclasses.replace(TINY_MODELS["gptoss"], config=TINY_MODELS["gptoss"].config | sizes)
    rng = np.random.default_rng(7)

    def store(name: str, values: Array) -> Stored:
        if "_exps.weight" not in name:
            return plain(name, values)
        chosen = dict(zip(("gate", "up", "down"), types, strict=True))[name.split("_")[1]]
        return Stored(chosen, values.shape, random_blocks(chosen, values.size, rng).tobytes())

    path = write_converted(tmp_path / "m.gguf", model, store)
    config = load_config(path)
    calls: list[tuple[int, int]] = []
    whole = load_weights(path, config, float32, OPS)
    assert_shares_make_the_whole(config, whole, load_shares(path, config, 2))
    load_weights(path, config, float32, OPS, lambda *done: calls.append(done), rank=Rank(1, 2))
    assert calls[-1][0] == calls[-1][1] < whole.nbytes


def test_blocks_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    """Before anything is read."""
    path = write_converted(tmp_path / "m.gguf", wide(head_dim=64), Quantizer("Q4_K"))
    calls: list[tuple[int, int]] = []
    error = r"--tensor-parallel-size 4: .*o_proj.*columns 0 to 63 are not whole blocks of 256"
    with pytest.raises(ModelError, match=error):
        load_weights(path, load_config(path), float32, OPS, lambda *done: calls.append(done), rank=Rank(0, 4))
    assert not calls


@pytest.mark.parametrize(
    ("size", "changes", "error"),
    [
        (3, {}, "--tensor-parallel-size 3 does not divide the model's 4 attention heads"),
        (4, {"intermediate_size": 3}, "--tensor-parallel-size 4 is more than the 3 inner elements"),
    ],
)
def test_heads_and_inner_elements_must_suffice(size: int, changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    model = dataclasses.replace(TINY_MODELS["llama"], config=TINY_MODELS["llama"].config | changes)
    with pytest.raises(ConfigError, match=error):
        Partition(load_config(build(model, tmp_path)), Rank(0, size))


def test_key_value_heads_are_repeated_where_ranks_need_them(tmp_path: Path) -> None:
    """Twelve query heads in groups of three: of four ranks each has one whole group; of six some share a head; of three
    some have the heads of several groups, as often as their queries need."""
    changes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 2}
    model = dataclasses.replace(TINY_MODELS["llama"], config=TINY_MODELS["llama"].config | changes)
    config = load_config(build(model, tmp_path))
    expected = {
        4: [[0], [1], [2], [3]],
        3: [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]],
        6: [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3]],
        12: [[head // 3] for head in range(12)],
    }
    for size, heads in expected.items():
        for index, of_rank in enumerate(heads):
            partition = Partition(config, Rank(index, size))
            assert partition.config.layers[0].attention.num_kv_heads == len(of_rank)
            rows = partition.share("qkv", 0).rows
            assert rows is not None
            keys = rows[12 // size * 2 :][: 2 * len(of_rank)].reshape(-1, 2)
            assert ((keys[:, 0] - 24) // 2).tolist() == of_rank


def test_a_share_of_a_checkpoint_is_all_that_is_allocated(tmp_path: Path) -> None:
    path = build(WIDE, tmp_path)
    config = load_config(path)
    whole = num_weight_bytes(config, float32)
    calls: list[tuple[int, int]] = []
    for index in range(4):
        rank = Rank(index, 4)
        own = load_weights(path, config, float32, OPS, lambda *done: calls.append(done), rank=rank)
        assert own.nbytes == num_weight_bytes(Partition(config, rank).config, float32) < whole / 2
        assert calls[-1] == (own.nbytes, own.nbytes)


def test_random_weights_are_equal_where_all_ranks_have_them(tmp_path: Path) -> None:
    config = load_config(build(TINY_MODELS["gptoss"], tmp_path))
    first, second = (dummy_weights(config, float32, OPS, seed=3, rank=Rank(index, 2)) for index in range(2))
    for one, other in zip(first.layers, second.layers, strict=True):
        assert isinstance(one.mlp, MoEWeights)
        assert isinstance(other.mlp, MoEWeights)
        assert np.array_equal(dense(one.mlp.router), dense(other.mlp.router))
        assert not np.array_equal(dense(one.attention.qkv), dense(other.attention.qkv))
