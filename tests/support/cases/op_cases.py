"""Inputs for the tests of the operations, the same for both devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.engine.formats import (
    BLOCK_FORMATS,
    FORMATS,
    KERNEL_FORMATS,
    DenseFormat,
    Fp8Format,
    GroupFormat,
    Int8RowsFormat,
    LinearWeight,
    Nf4Format,
    PackedBlockFormat,
    PackedGroupFormat,
    WeightPart,
)
from tessera.engine.ops.interface import AttentionMetadata
from tessera.engine.tensor import CpuDevice, Device, Tensor, bfloat16, empty, float16, float32, from_numpy
from tests.support.cases.gguf_blocks import random_blocks

Array = np.ndarray[Any, Any]

DTYPES = [float32, bfloat16, float16]


def affine(values: Array) -> dict[str, Array]:
    arrays = GroupFormat().quantize(values)
    return {"values": arrays["values"], "scales": arrays["scales"], "offsets": -arrays["scales"] * arrays["zeros"]}


QUANTIZE = {
    "int8_rows": Int8RowsFormat.quantize,
    "fp8": Fp8Format.quantize,
    "int_groups": GroupFormat().quantize,
    "affine_groups": affine,
    "nf4": Nf4Format().quantize,
}
IN_PAIRS = ("int_groups", "affine_groups", "nf4")  # two columns a byte
DECODE_ROWS = tuple((1, int(length)) for length in np.random.default_rng(1).integers(1, 900, 64))  # (queries, context)


def random_array(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any] = float32, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def random_angles(num_positions: int, rotary_dim: int) -> Array:
    """A table of cosines, then sines, of random angles, [num_positions, rotary_dim]."""
    angles = np.random.default_rng(6).uniform(-3, 3, (num_positions, rotary_dim // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def poisoned(shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> Tensor:
    """A tensor of NaN: an element that an operation leaves out is found."""
    tensor = empty(shape, dtype, device)
    tensor.upload(np.full(shape, np.nan, dtype))
    return tensor


def mixed_weight(
    device: Device, dtype: np.dtype[Any], formats: list[str], rows: list[int], columns: int
) -> tuple[LinearWeight, Array]:
    """A weight whose parts have these formats and rows, and the numbers it stands for, [sum(rows), columns]."""
    parts, numbers = [], []
    for seed, (name, count) in enumerate(zip(formats, rows, strict=True)):
        format = DenseFormat(dtype) if name == "dense" else FORMATS[name]()
        if name.upper() in BLOCK_FORMATS:
            blocks = random_blocks(name.upper(), count * columns, np.random.default_rng(seed))
            arrays = {"blocks": blocks.reshape(count, -1)}
        elif isinstance(format, PackedGroupFormat):
            arrays = random_groups(format, count, columns, np.random.default_rng(seed))
        elif isinstance(format, PackedBlockFormat):
            blocks = random_blocks(format.type.name, count * columns, np.random.default_rng(seed))
            arrays = format.pack(blocks.reshape(count, -1))
        else:
            values = random_array(seed, (count, columns), dtype, columns**-0.5)
            arrays = {"values": values} if name == "dense" else QUANTIZE[name](values)
        tensors = {name: from_numpy(array, device) for name, array in arrays.items()}
        parts.append(WeightPart(format, (count, columns), tensors))
        numbers.append(format.dequantize(arrays, slice(None))[:, :columns])
    return LinearWeight(tuple(parts)), np.concatenate(numbers)


def random_groups(format: PackedGroupFormat, rows: int, columns: int, rng: np.random.Generator) -> dict[str, Array]:
    """Any codes but the NaN of e4m3; scales with few bits for weights of 1 at most or so; zeros of any integer."""
    kind = format.kernel_type.partition("Group")[0]
    codes, headers = format.layout(rows, columns)
    numbers = rng.integers(
        0,
        0x7F if kind == "Fp8" else 1 << sum(format.planes),
        (codes.shape[0] * codes.shape[1] * 32 // sum(format.planes) // 128, 128),
    )
    if kind == "Fp8":
        numbers |= rng.integers(0, 2, numbers.shape) << 7
    largest = {"Int4": -3.0, "Int8": -6.0, "Fp8": -8.0, "Nf4": 0.0}[kind]
    scales = (
        (2.0 ** rng.uniform(largest - 3, largest, headers.shape)).astype(bfloat16).astype(np.float32).view(np.uint32)
    )
    zeros = rng.integers(0, 1 << sum(format.planes), headers.shape) if kind.startswith("Int") else 0
    arrays = format.codes_of(numbers.astype(np.uint8)).reshape(codes.shape), (scales | zeros).astype(np.uint32)
    return dict(zip(format.tensor_names, arrays, strict=True))


def columns_of(name: str, wanted: int) -> int:
    """The width next to `wanted` that a weight format can have; of packed blocks, without a part of a span."""
    block = BLOCK_FORMATS[name.upper()].type.block_size if name.upper() in BLOCK_FORMATS else 1 + (name in IN_PAIRS)
    packed = {format.name: format.span for format in KERNEL_FORMATS.values()}
    block = packed.get(name, block)
    return -(-wanted // block) * block


class ElsewhereDevice(CpuDevice):
    """Host memory that claims to be another device's."""

    name = "cuda:7"


@dataclass(frozen=True)
class AttentionCase:
    """A batch of rows, each (number of queries, context length); `padding` tokens belong to no row."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None
    dtype: np.dtype[Any] = float32
    padding: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class AttentionInputs:
    """Host arrays of one case, blocks in random order, NaN in every slot that holds no token."""

    case: AttentionCase
    q: Array = field(init=False)
    key_cache: Array = field(init=False)
    value_cache: Array = field(init=False)
    positions: Array = field(init=False)
    slot_mapping: Array = field(init=False)
    block_tables: Array = field(init=False)
    cu_seqlens_q: Array = field(init=False)
    context_lens: Array = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        rng = np.random.default_rng(len(case.rows) * 1000 + case.head_dim)
        self.context_lens = np.array([context for _, context in case.rows], np.int32)
        query_lens = np.array([queries for queries, _ in case.rows], np.int32)
        self.cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        num_tokens = int(self.cu_seqlens_q[-1]) + case.padding

        counts = -(-self.context_lens // case.block_size)
        order = rng.permutation(int(counts.sum()) + 3).astype(np.int32)
        self.block_tables = np.zeros((len(case.rows), int(counts.max(initial=0)) + 2), np.int32)
        pool = (len(order), case.num_kv_heads, case.block_size, case.head_dim)
        self.key_cache, self.value_cache = np.full(pool, np.nan, case.dtype), np.full(pool, np.nan, case.dtype)
        self.positions = np.zeros(num_tokens, np.int32)
        self.slot_mapping = np.full(num_tokens, -1, np.int32)
        for row, (queries, context) in enumerate(case.rows):
            blocks, order = order[: counts[row]], order[counts[row] :]
            self.block_tables[row, : len(blocks)] = blocks
            slots = np.arange(context)
            block, offset = blocks[slots // case.block_size], slots % case.block_size
            shape = (context, case.num_kv_heads, case.head_dim)
            self.key_cache[block, :, offset] = rng.standard_normal(shape).astype(case.dtype)
            self.value_cache[block, :, offset] = rng.standard_normal(shape).astype(case.dtype)
            if context:
                tokens = slice(int(self.cu_seqlens_q[row]), int(self.cu_seqlens_q[row + 1]))
                self.positions[tokens] = slots[context - queries :]
                self.slot_mapping[tokens] = (block * case.block_size + offset)[context - queries :]
        self.q = rng.standard_normal((num_tokens, case.num_heads * case.head_dim)).astype(case.dtype)

    def metadata(self, device: Device) -> AttentionMetadata:
        """Block tables in another order than the rows; a row without context points nowhere."""
        reversed_rows = np.arange(len(self.block_tables))[::-1]
        return AttentionMetadata(
            positions=from_numpy(self.positions, device),
            slot_mapping=from_numpy(self.slot_mapping, device),
            block_tables=from_numpy(np.ascontiguousarray(self.block_tables[::-1]), device),
            table_rows=from_numpy(np.where(self.context_lens, reversed_rows, -(1 << 30)).astype(np.int32), device),
            cu_seqlens_q=from_numpy(self.cu_seqlens_q, device),
            context_lens=from_numpy(self.context_lens, device),
            max_seqlen_q=int(np.diff(self.cu_seqlens_q).max(initial=0)),
            max_context_len=int(self.context_lens.max(initial=0)),
        )

    def caches(self, device: Device) -> tuple[Tensor, Tensor]:
        return from_numpy(self.key_cache, device), from_numpy(self.value_cache, device)


MIXED = ((1, 40), (5, 5), (7, 33), (1, 1), (0, 0), (1, 17), (3, 100), (0, 9), (1, 97))

ATTENTION_CASES = [
    AttentionCase("one_token", ((1, 1),)),
    AttentionCase("mixed", MIXED, padding=3),
    AttentionCase("mixed_window", MIXED, sliding_window=7, padding=1),
    AttentionCase("window_of_one", MIXED, sliding_window=1),
    AttentionCase("soft_cap", MIXED, soft_cap=1.5),
    AttentionCase("soft_cap_128", MIXED, head_dim=128, soft_cap=1.5),
    AttentionCase("soft_cap_256", MIXED, head_dim=256, soft_cap=0.7, sliding_window=30),
    AttentionCase("window_larger_than_context", MIXED, sliding_window=4096),
    AttentionCase("only_padding_rows", ((1, 0), (1, 0), (4, 0))),
    AttentionCase("padded_decode", ((1, 12), (1, 0), (1, 130), (1, 0))),
    AttentionCase("long_prefill", ((300, 300), (290, 411)), head_dim=8),
    AttentionCase("long_prefill_window", ((300, 300), (290, 411)), head_dim=8, sliding_window=40),
    *[
        AttentionCase(f"group_{heads // kv_heads}", MIXED, num_heads=heads, num_kv_heads=kv_heads)
        for heads, kv_heads in ((3, 3), (4, 2), (8, 2), (8, 1), (24, 3))
    ],
    *[AttentionCase(f"head_dim_{dim}", MIXED, head_dim=dim) for dim in (8, 20, 64, 80, 96, 128)],
    *[AttentionCase(f"block_size_{size}", MIXED, block_size=size, sliding_window=30) for size in (8, 32, 64)],
    *[AttentionCase(f"dtype_{dtype}", MIXED, head_dim=64, dtype=dtype) for dtype in (bfloat16, float16)],
    AttentionCase("dtype_bfloat16_window", MIXED, head_dim=128, dtype=bfloat16, sliding_window=19, num_heads=8),
]
