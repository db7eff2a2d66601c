"""Packers of quantised matrices, written from each format's public specification, and the folders they make.

Each takes a matrix [N, K], and gives the tensors that stand for it beside `module.` and the numbers they mean, float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from tests.support.models.tiny_models import TINY_MODELS, TinyModel, make_tensors

Array = np.ndarray[Any, Any]
Packed: TypeAlias = tuple[dict[str, Array], Array]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
SAFETENSORS_NAMES = {
    **{np.dtype(name): short for name, short in (("float32", "F32"), ("float16", "F16"), ("int64", "I64"))},
    **{np.dtype(name): short for name, short in (("int32", "I32"), ("uint32", "U32"), ("int8", "I8"), ("uint8", "U8"))},
    E4M3: "F8_E4M3",
    BF16: "BF16",
}
# "NormalFloat", QLoRA (arXiv 2305.14314), appendix E.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def write_tensors(path: Path, tensors: dict[str, Array]) -> None:
    """A safetensors file of any dtypes."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw)


def words_of(fields: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """[n, m] integers -> int32 [n, ceil(m bits / 32)]: field i of a word is its bits from i * bits on."""
    a_word = 32 // bits
    padded = np.pad(fields.astype(np.int64), ((0, 0), (0, -fields.shape[1] % a_word)))
    grouped = padded.reshape(len(fields), -1, a_word)[:, :, list(order or range(a_word))]
    return (grouped << np.arange(a_word) * bits).sum(axis=2).astype(np.uint32).view(np.int32)


def grouped(w: Array, bits: int, groups: Array, *, symmetric: bool) -> tuple[Array, Array, Array, Array]:
    """Integers [N, K], scales float16 [N, G] and zeros [N, G], rounded to nearest; the numbers in float64.

    `groups` [K] is that of each column.
    """
    rows, most = len(w), (1 << bits) - 1
    scales, zeros = np.empty((rows, groups.max() + 1), np.float16), np.empty((rows, groups.max() + 1), np.int64)
    for group in range(groups.max() + 1):
        low, high = w[:, groups == group].min(axis=1), w[:, groups == group].max(axis=1)
        if symmetric:
            scales[:, group] = 2 * np.maximum(np.abs(low), np.abs(high)) / most
            zeros[:, group] = (most + 1) // 2
        else:
            scales[:, group] = (np.maximum(high, 0) - np.minimum(low, 0)) / most
            zeros[:, group] = np.clip(np.rint(-np.minimum(low, 0) / scales[:, group]), 0, most)
    wide, offset = scales.astype(np.float64)[:, groups], zeros[:, groups]
    integers = np.clip(np.rint(w / wide) + offset, 0, most).astype(np.int64)
    return integers, scales, zeros, (integers - offset) * wide


def in_a_row(columns: int, group: int) -> Array:
    return np.arange(columns) // (columns if group == -1 else group)


def by_importance(columns: int, group: int) -> Array:
    """The group of each column where columns are taken in some other order."""
    groups = np.empty(columns, np.int64)
    groups[np.random.default_rng(columns).permutation(columns)] = in_a_row(columns, group)
    return groups


def compressed(
    w: Array, bits: int, group: int, *, symmetric: bool, acts: bool = False, int8_zeros: bool = False
) -> Packed:
    """pack-quantized of compressed-tensors (compressors/quantized_compressors/pack_quantized.py)."""
    groups = by_importance(w.shape[1], group) if acts else in_a_row(w.shape[1], group)
    integers, scales, zeros, _ = grouped(w, bits, groups, symmetric=symmetric)
    tensors = {
        "weight_packed": words_of(integers, bits),
        "weight_scale": scales.astype(BF16),
        "weight_shape": np.array(w.shape, np.int64),
    }
    if not symmetric:
        signed = (zeros - (1 << (bits - 1))).astype(np.int8)
        tensors["weight_zero_point"] = signed if int8_zeros else words_of(zeros.T, bits).T
    if acts:
        tensors["weight_g_idx"] = groups.astype(np.int32)
    stored = tensors["weight_scale"].astype(np.float64)[:, groups]
    return tensors, (integers - zeros[:, groups]) * stored


def gptq(w: Array, bits: int, group: int, *, symmetric: bool, acts: bool = False, second: bool = False) -> Packed:
    """AutoGPTQ's QuantLinear.pack (nn_modules/qlinear/qlinear_cuda.py); the second version stores zeros as they are."""
    groups = by_importance(w.shape[1], group) if acts else in_a_row(w.shape[1], group)
    integers, scales, zeros, numbers = grouped(w, bits, groups, symmetric=symmetric)
    stored = zeros if second else (zeros - 1) % (1 << bits)
    tensors = {
        "qweight": words_of(integers, bits).T,
        "qzeros": words_of(stored.T, bits),
        "scales": scales.T,
        "g_idx": groups.astype(np.int32),
    }
    return tensors, numbers


def awq(w: Array, group: int) -> Packed:
    """AutoAWQ's WQLinear_GEMM.from_linear (awq/modules/linear/gemm.py)."""
    integers, scales, zeros, numbers = grouped(w, 4, in_a_row(w.shape[1], group), symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words_of(integers.T, 4, order), "qzeros": words_of(zeros.T, 4, order), "scales": scales.T}
    return tensors, numbers


def fp8(w: Array, block: tuple[int, int] | None, *, name: str = "weight_scale", static: bool = False) -> Packed:
    """e4m3 with a scale for each block; None: for all (compressed-tensors, DeepSeek-V3's README_WEIGHTS)."""
    rows, columns = w.shape
    high, wide = block or w.shape
    r, k = np.arange(rows)[:, None] // high, np.arange(columns)[None] // wide
    scales = np.zeros((-(-rows // high), -(-columns // wide)), np.float32)
    np.maximum.at(scales, (np.broadcast_to(r, w.shape), np.broadcast_to(k, w.shape)), np.abs(w).astype(np.float32))
    scales /= 448
    values = (w / scales[r, k]).astype(np.float32).astype(E4M3)
    tensors = {"weight": values, name: scales if block else scales.reshape(1)}
    if static:
        tensors["input_scale"] = np.array(0.02, np.float32)
    return tensors, values.astype(np.float64) * scales[r, k]


def int8(w: Array) -> Packed:
    """int-quantized of compressed-tensors: a scale for each row."""
    scales = (np.abs(w).max(axis=1, keepdims=True) / 127).astype(np.float32)
    values = np.rint(w / scales).astype(np.int8)
    return {"weight": values, "weight_scale": scales}, values.astype(np.float64) * scales


def nf4(w: Array, block: int, *, nested: bool) -> Packed:
    """bitsandbytes' Params4bit: two codes a byte, the first one high (functional.py, quantize_4bit and QuantState)."""
    table = np.array(NF4, np.float32)
    blocks = w.reshape(-1, block)
    absmax = np.abs(blocks).max(axis=1).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(w.shape)}
    tensors: dict[str, Array] = {}
    if nested:
        offset = float(absmax.mean())
        quant_map = np.sort(np.random.default_rng(1).uniform(-1, 1, 256)).astype(np.float32)
        pieces = [absmax[start : start + 256] - np.float32(offset) for start in range(0, len(absmax), 256)]
        largest = np.array([np.abs(piece).max() for piece in pieces], np.float32)
        codes = [np.abs(quant_map - (p / m)[:, None]).argmin(axis=1) for p, m in zip(pieces, largest, strict=True)]
        flat = np.concatenate(codes).astype(np.uint8)
        tensors = {"weight.absmax": flat, "weight.nested_absmax": largest, "weight.nested_quant_map": quant_map}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        absmax = quant_map[flat] * np.repeat(largest, 256)[: len(flat)] + np.float32(offset)
    else:
        tensors = {"weight.absmax": absmax}
    codes4 = np.abs(table[None, None] - (blocks / absmax[:, None])[:, :, None]).argmin(axis=2)
    flat4 = codes4.reshape(-1, 2)
    tensors["weight"] = (flat4[:, :1] << 4 | flat4[:, 1:]).astype(np.uint8)
    tensors["weight.quant_map"] = table
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    numbers = table.astype(np.float64)[codes4] * absmax.astype(np.float64)[:, None]
    return tensors, numbers.reshape(w.shape)


def mlx(w: Array, bits: int, group: int) -> Packed:
    """mlx.core.quantize in mode affine: w = q * scale + bias."""
    groups = in_a_row(w.shape[1], group)
    low = np.stack([w[:, groups == g].min(axis=1) for g in range(groups.max() + 1)], axis=1).astype(BF16)
    high = np.stack([w[:, groups == g].max(axis=1) for g in range(groups.max() + 1)], axis=1)
    scales = ((high - low.astype(np.float64)) / ((1 << bits) - 1)).astype(BF16)
    wide, offset = scales.astype(np.float64)[:, groups], low.astype(np.float64)[:, groups]
    integers = np.clip(np.rint((w - offset) / wide), 0, (1 << bits) - 1).astype(np.int64)
    tensors = {"weight": words_of(integers, bits).view(np.uint32), "scales": scales, "biases": low}
    return tensors, integers * wide + offset


# -- schemes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A way to quantise the linear layers of a model: config.json's section, and the packer of a matrix.

    Attributes:
        rounds_input: activations are rounded too.
        embeddings: are quantised as well.
    """

    config: dict[str, Any]
    pack: Callable[[Array], Packed]
    key: str = "quantization_config"
    rounds_input: bool = False
    embeddings: bool = False


def _groups(weights: dict[str, Any], inputs: dict[str, Any] | None, format: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    head = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return {**head, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def packed_config(bits: int, group: int, *, symmetric: bool, **more: Any) -> dict[str, Any]:
    shape = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **shape, **more}
    return _groups(weights, None, "pack-quantized")


def _float_config(strategy: str, dynamic: bool | None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    inputs = None if dynamic is None else {"num_bits": 8, "type": "float", "dynamic": dynamic, "symmetric": True}
    return _groups(weights, inputs, "float-quantized")


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

SCHEMES: dict[str, Scheme] = {
    "w4a16": Scheme(packed_config(4, 32, symmetric=True), lambda w: compressed(w, 4, 32, symmetric=True)),
    "w4a16-asymmetric": Scheme(packed_config(4, 32, symmetric=False), lambda w: compressed(w, 4, 32, symmetric=False)),
    "w4a16-actorder": Scheme(
        packed_config(4, 32, symmetric=False, actorder="group"),
        lambda w: compressed(w, 4, 32, symmetric=False, acts=True, int8_zeros=True),
    ),
    "w4a16-channel": Scheme(packed_config(4, -1, symmetric=True), lambda w: compressed(w, 4, -1, symmetric=True)),
    "w8a16": Scheme(packed_config(8, 32, symmetric=True), lambda w: compressed(w, 8, 32, symmetric=True)),
    "w8a8": Scheme(_groups(_INT8, _TOKEN, "int-quantized"), int8, rounds_input=True),
    "fp8-tensor": Scheme(_float_config("tensor", False), lambda w: fp8(w, None, static=True), rounds_input=True),
    "fp8-channel": Scheme(_float_config("channel", True), lambda w: fp8(w, (1, w.shape[1])), rounds_input=True),
    "fp8-weights": Scheme(_float_config("channel", None), lambda w: fp8(w, (1, w.shape[1]))),
    "fp8-block": Scheme(
        _float_config("block", True, block_structure=[32, 16]), lambda w: fp8(w, (32, 16)), rounds_input=True
    ),
    "deepseek": Scheme(_BLOCKS, lambda w: fp8(w, (32, 16), name="weight_scale_inv"), rounds_input=True),
    "fp8-static": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda w: fp8(w, None, static=True),
        rounds_input=True,
    ),
    "modelopt": Scheme(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]},
        lambda w: fp8(w, None, static=True),
        rounds_input=True,
    ),
    "awq": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda w: awq(w, 32),
    ),
    "gptq": Scheme(gptq_config(4, 32), lambda w: gptq(w, 4, 32, symmetric=True)),
    "gptq-actorder": Scheme(gptq_config(4, 32, desc_act=True), lambda w: gptq(w, 4, 32, symmetric=False, acts=True)),
    "gptq-row-8": Scheme(gptq_config(8, -1, sym=False), lambda w: gptq(w, 8, -1, symmetric=False)),
    "gptq-v2": Scheme(
        gptq_config(4, 32, checkpoint_format="gptq_v2"), lambda w: gptq(w, 4, 32, symmetric=False, second=True)
    ),
    "nf4": Scheme(_BNB, lambda w: nf4(w, 32, nested=False)),
    "nf4-nested": Scheme({**_BNB, "bnb_4bit_use_double_quant": True}, lambda w: nf4(w, 32, nested=True)),
    "mlx": Scheme({"group_size": 32, "bits": 4}, lambda w: mlx(w, 4, 32), "quantization", embeddings=True),
}


def quantised_model(
    folder: Path, scheme: Scheme, base: str | TinyModel = "llama", *, plain: tuple[str, ...] = ("lm_head",)
) -> tuple[Path, Path]:
    """A tiny model quantised, and the same with the numbers that its matrices stand for.

    Modules with a text of `plain` in their name stay as they are.
    """
    model = TINY_MODELS[base] if isinstance(base, str) else base
    quantised, exact = pack_tensors(make_tensors(replace(model, prefix="")), scheme, plain)
    for kind, tensors in (("quantised", quantised), ("exact", exact)):
        (folder / kind).mkdir(parents=True)
        config = {**model.config, scheme.key: scheme.config} if kind == "quantised" else model.config
        (folder / kind / "config.json").write_text(json.dumps(config))
        write_tensors(folder / kind / "model.safetensors", tensors)
    return folder / "quantised", folder / "exact"


def pack_tensors(
    tensors: dict[str, Array], scheme: Scheme, plain: tuple[str, ...] = ("lm_head",)
) -> tuple[dict[str, Array], dict[str, Array]]:
    """A model's tensors quantised, and those of the numbers that they stand for."""
    quantised: dict[str, Array] = {}
    exact: dict[str, Array] = {}
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        matrix = values.ndim == 2 and ("embed" not in name or scheme.embeddings)
        if not matrix or any(text in module for text in plain):
            quantised[name] = exact[name] = values.astype(np.float32)
            continue
        packed, numbers = scheme.pack(values.astype(np.float64))
        quantised |= {f"{module}.{part}": array for part, array in packed.items()}
        exact[name] = numbers.astype(np.float32)
    return quantised, exact
