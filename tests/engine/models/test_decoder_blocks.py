"""Decoders of all kinds of blocks against a float64 forward, with weights that no checkpoint needs to have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tessera.engine.collectives.cpu import CpuCollectives, RankMemory
from tessera.engine.collectives.rendezvous import Rendezvous
from tessera.engine.formats import DenseFormat, Int8RowsFormat, KVFormat, LinearWeight, WeightPart
from tessera.engine.models.config import ModelConfig
from tessera.engine.models.kv_cache import block_bytes
from tessera.engine.models.rope import RopeConfig
from tessera.engine.models.specs import AttentionSpec, HalfNorms, LayerSpec, MLPSpec, NormSpec
from tessera.engine.models.weights.weights import Weights
from tessera.engine.ops.interface import AttentionMetadata
from tessera.engine.ops.make import make_ops
from tessera.engine.tensor import CPU, Tensor, float16, float32, from_numpy
from tests.support.decoder_harness import DecoderHarness, int32, relative_error
from tests.support.references import decoder_reference

Array = np.ndarray[Any, Any]

HIDDEN, VOCAB, LENGTH, SEED = 32, 50, 40, 20261122
TOKEN_IDS = np.random.default_rng(SEED).integers(0, VOCAB, LENGTH).tolist()

RMS, LAYER, BIASED = NormSpec("rmsnorm", 1e-5), NormSpec("layernorm", 1e-5), NormSpec("layernorm", 1e-5, bias=True)
BEFORE = HalfNorms(before=RMS)
SLOW, FAST = RopeConfig("default", 1000.0, 8, LENGTH), RopeConfig("default", 30.0, 4, LENGTH)
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, norms=BEFORE, rope=0)
MLP = MLPSpec(inner_size=48, activation="silu_mul", norms=BEFORE)
PLAIN = LayerSpec(ATTENTION, MLP)


def model(*layers: LayerSpec, **settings: Any) -> ModelConfig:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        layers=layers,
        final_norm=RMS,
        embedding_norm=None,
        ropes=(SLOW,),
        learned_positions=False,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        eos_token_ids=(),
        bos_token_id=None,
        torch_dtype=None,
    )
    return replace(config, **settings)


def normed(norms: HalfNorms, **changes: Any) -> LayerSpec:
    """With these norms around both halves."""
    return LayerSpec(replace(ATTENTION, norms=norms), replace(MLP, norms=norms), **changes)


AFTER = normed(HalfNorms(after=RMS))
BOTH = normed(HalfNorms(before=RMS, after=RMS))
OF_SUM = normed(HalfNorms(of_sum=BIASED))
PARALLEL = normed(HalfNorms(before=BIASED), parallel=True)
ONE_NORM = LayerSpec(replace(ATTENTION, norms=HalfNorms(before=LAYER)), replace(MLP, norms=HalfNorms()), parallel=True)
WINDOWED = LayerSpec(replace(ATTENTION, rope=1, sliding_window=9), MLP)
UNROTATED = LayerSpec(replace(ATTENTION, rope=None), MLP)
BIASES = LayerSpec(
    replace(ATTENTION, qkv_bias=True, out_bias=True, qk_norm=RMS), replace(MLP, up_bias=True, down_bias=True)
)
CAPPED = LayerSpec(replace(ATTENTION, soft_cap=0.8), MLP)
WIDTH_NORM = LayerSpec(replace(ATTENTION, qk_norm=RMS, qk_norm_form="width"), MLP)
OWN_NORMS = LayerSpec(replace(ATTENTION, qk_norm=LAYER, qk_norm_form="each_head"), MLP)
ROTATED_NORM = LayerSpec(replace(ATTENTION, qk_norm=RMS, qk_norm_form="rotated_head"), MLP)
UNROTATED_NORM = LayerSpec(replace(ATTENTION, rope=None, qk_norm=RMS, qk_norm_form="rotated_head"), MLP)
SMALLER = LayerSpec(replace(ATTENTION, num_heads=2, num_kv_heads=1), replace(MLP, inner_size=20))


def activated(activation: Any) -> LayerSpec:
    return LayerSpec(ATTENTION, replace(MLP, activation=activation))


MODELS = {
    "plain": model(PLAIN, PLAIN, PLAIN),
    "norm_after": model(AFTER, AFTER, AFTER),
    "norms_on_both_sides": model(BOTH, BOTH, BOTH),
    "norm_of_the_sum": model(OF_SUM, OF_SUM, OF_SUM),
    "parallel": model(PARALLEL, PARALLEL, PARALLEL),
    "parallel_with_one_norm": model(ONE_NORM, ONE_NORM, ONE_NORM),
    "gelu_gated": model(activated("gelu_tanh_mul"), activated("gelu_erf_mul")),
    "gelu": model(activated("gelu_tanh"), activated("gelu_erf")),
    "relu": model(activated("relu"), activated("relu2")),
    "attention_soft_cap": model(CAPPED, CAPPED),
    "norm_of_all_heads": model(WIDTH_NORM, WIDTH_NORM),
    "norms_of_each_head": model(OWN_NORMS, OWN_NORMS),
    "norm_after_the_rotation": model(ROTATED_NORM, UNROTATED_NORM, ROTATED_NORM),
    "head_bias": model(PLAIN, head_bias=True),
    "two_ropes": model(WINDOWED, PLAIN, WINDOWED, ropes=(SLOW, FAST)),
    "some_unrotated": model(PLAIN, UNROTATED, PLAIN),
    "biases_and_head_norms": model(BIASES, BIASES),
    "multipliers": model(
        replace(PLAIN, residual_multiplier=0.4),
        replace(BOTH, residual_multiplier=1.7),
        embedding_multiplier=3.0,
        logits_multiplier=0.25,
    ),
    "soft_cap": model(PLAIN, PLAIN, logits_soft_cap=1.5),
    "positions": model(UNROTATED, UNROTATED, ropes=(), learned_positions=True, final_norm=BIASED),
    "all_kinds": model(ONE_NORM, SMALLER, WINDOWED, BIASES, PARALLEL, BOTH, UNROTATED, ropes=(SLOW, FAST)),
}

# What makes each a kind of its own, undone; with the same weights the logits must then be far off.
UNDONE = {
    "norm_after": normed(HalfNorms()),
    "norms_on_both_sides": normed(HalfNorms(before=RMS)),
    "norm_of_the_sum": normed(HalfNorms()),
    "parallel": replace(PARALLEL, parallel=False),
    "parallel_with_one_norm": replace(ONE_NORM, parallel=False),
    "gelu_gated": PLAIN,
    "attention_soft_cap": PLAIN,
    "norm_after_the_rotation": LayerSpec(replace(ATTENTION, qk_norm=RMS), MLP),
    "two_ropes": LayerSpec(replace(ATTENTION, sliding_window=9), MLP),
    "some_unrotated": PLAIN,
}


def harness(config: ModelConfig, weights: Weights, **settings: Any) -> DecoderHarness:
    return DecoderHarness(config, weights, make_ops(CPU), float32, max_model_len=64, **settings)


def logits(config: ModelConfig, weights: Weights, chunks: list[int] | None = None, **settings: Any) -> Array:
    return harness(config, weights, **settings).logits(TOKEN_IDS, chunks)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference(name: str) -> None:
    config = MODELS[name]
    weights = decoder_reference.random_weights(config, SEED)
    expected = decoder_reference.logits(config, weights, TOKEN_IDS)
    assert relative_error(logits(config, weights), expected) < 1e-5
    assert relative_error(logits(config, weights, [17, 1, 1, 21]), expected) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_last_layer_of_chosen_tokens_gives_the_same(name: str) -> None:
    """One token's logits without the last layer's rest."""
    config = MODELS[name]
    weights = decoder_reference.random_weights(config, SEED)
    made = harness(config, weights)
    inputs, metadata, _ = made.step_inputs(TOKEN_IDS, 0, list(range(made.num_blocks)))
    position = LENGTH - 1
    last = replace(
        metadata,
        positions=from_numpy(int32([position]), CPU),
        slot_mapping=from_numpy(int32([-1]), CPU),
        cu_seqlens_q=from_numpy(int32([0, 1]), CPU),
        context_lens=from_numpy(int32([LENGTH]), CPU),
        max_seqlen_q=1,
    )
    assert isinstance(last, AttentionMetadata)
    chosen = from_numpy(int32([position]), CPU)
    found = made.decoder.forward(inputs, metadata, chosen, made.buffers, last=last).numpy()
    assert relative_error(found, decoder_reference.logits(config, weights, TOKEN_IDS)[-1:]) < 1e-5


@pytest.mark.parametrize("name", UNDONE)
def test_the_reference_tells_kinds_apart(name: str) -> None:
    config = MODELS[name]
    weights = decoder_reference.random_weights(config, SEED)
    changed = replace(config, layers=(UNDONE[name],) * config.num_layers)
    expected = decoder_reference.logits(config, weights, TOKEN_IDS)
    assert relative_error(decoder_reference.logits(changed, weights, TOKEN_IDS), expected) > 1e-3


def quantised(weight: LinearWeight, part_rows: list[int], formats: list[str]) -> LinearWeight:
    values, parts = decoder_reference.numbers(weight).astype(np.float32), []
    for rows, name in zip(np.split(values, np.cumsum(part_rows)[:-1]), formats, strict=True):
        arrays = Int8RowsFormat.quantize(rows) if name == "int8_rows" else {"values": rows}
        format = Int8RowsFormat() if name == "int8_rows" else DenseFormat(float32)
        tensors = {key: from_numpy(array, CPU) for key, array in arrays.items()}
        parts.append(WeightPart(format, (len(rows), values.shape[1]), tensors))
    return LinearWeight(tuple(parts), weight.bias)


def test_a_model_of_int8_rows_with_a_fused_weight_of_several_formats() -> None:
    config = MODELS["biases_and_head_norms"]
    dense = decoder_reference.random_weights(config, SEED)
    layers = tuple(
        replace(
            layer,
            attention=replace(
                layer.attention,
                qkv=quantised(layer.attention.qkv, [32, 16, 16], ["int8_rows", "dense", "int8_rows"]),
                out=quantised(layer.attention.out, [32], ["int8_rows"]),
            ),
            mlp=replace(
                layer.mlp,
                up=quantised(layer.mlp.up, [48, 48], ["dense", "int8_rows"]),
                down=quantised(layer.mlp.down, [32], ["int8_rows"]),
            ),
        )
        for layer in dense.layers
    )
    table = quantised(dense.embedding, [VOCAB], ["int8_rows"])
    weights = replace(dense, layers=layers, embedding=table, lm_head=table)
    expected = decoder_reference.logits(config, weights, TOKEN_IDS)
    assert relative_error(logits(config, weights), expected) < 1e-5
    assert relative_error(logits(config, dense), expected) > 1e-3
    assert weights.num_parameters == dense.num_parameters - VOCAB * HIDDEN, "the head is the embedding now"
    assert weights.nbytes < dense.nbytes / 2
    assert weights.nbytes == sum(tensor.nbytes for tensor in weights.tensors())


class DoublingRanks(CpuCollectives):
    """A lone rank, but all sums except that of embeddings are twice what it has."""

    def __init__(self, index: int, memory: RankMemory) -> None:
        super().__init__(index, memory)
        self.seen: list[tuple[int, ...]] = []

    def all_reduce(self, x: Tensor) -> None:
        super().all_reduce(x)
        if self.seen:
            x.numpy()[...] *= 2
        self.seen.append(x.shape)

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> bool:
        return False


@pytest.mark.parametrize("name", ["plain", "parallel", "norms_on_both_sides"])
def test_updates_are_reduced_before_they_are_added(name: str) -> None:
    """Twice the update is twice the last projection; of both halves and every layer."""
    config = MODELS[name]
    weights = decoder_reference.random_weights(config, SEED)
    ranks = DoublingRanks(0, RankMemory(Rendezvous(1, timeout=5.0)))
    found = logits(config, weights, ranks=ranks)
    embedded, *updates = ranks.seen
    assert embedded == (LENGTH, HIDDEN)
    assert updates == [(LENGTH, HIDDEN)] * (2 * config.num_layers)

    def doubled(weight: LinearWeight) -> LinearWeight:
        assert weight.dense is not None
        return LinearWeight.of(from_numpy(2 * weight.dense.numpy(), CPU))

    layers = tuple(
        replace(
            layer,
            attention=replace(layer.attention, out=doubled(layer.attention.out)),
            mlp=replace(layer.mlp, down=doubled(layer.mlp.down)),
        )
        for layer in weights.layers
    )
    expected = decoder_reference.logits(config, replace(weights, layers=layers), TOKEN_IDS)
    assert relative_error(found, expected) < 1e-5


def test_a_cache_may_hold_another_dtype() -> None:
    config = MODELS["plain"]
    weights = decoder_reference.random_weights(config, SEED)
    made = harness(config, weights, kv_dtype=float16)
    assert {tensor.dtype for pair in made.decoder.caches for tensor in pair} == {float16}
    error = relative_error(made.logits(TOKEN_IDS), decoder_reference.logits(config, weights, TOKEN_IDS))
    assert 1e-6 < error < 5e-3


def test_a_cache_has_room_for_each_layers_heads() -> None:
    config = MODELS["all_kinds"]
    made = harness(config, decoder_reference.random_weights(config, SEED))
    shapes = [keys.shape for keys, _ in made.decoder.caches]
    assert shapes[0][1:] == (2, 8, 8)
    assert shapes[1][1:] == (1, 8, 8)
    total = sum(tensor.nbytes for pair in made.decoder.caches for tensor in pair)
    assert total == 2 * made.num_blocks * block_bytes(config, 8, KVFormat(float32))
