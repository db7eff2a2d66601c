"""Inputs of decode attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.engine.ops.interface import HeadTransform, Ops
from tessera.engine.tensor import from_numpy
from tests.support.cases.op_cases import AttentionCase, AttentionInputs, poisoned, random_array

Array = np.ndarray[Any, Any]


@dataclass
class DecodeInputs:
    """A step as the layers have it: the newest token of a row is in `qkv` alone."""

    inputs: AttentionInputs
    qkv: Array
    cos_sin: Array | None
    norms: dict[str, Array]

    @classmethod
    def of(cls, case: AttentionCase, norms: str = "qk", rotary_dim: int | None = None) -> DecodeInputs:
        inputs = AttentionInputs(case)
        heads = case.num_heads + 2 * case.num_kv_heads
        rotary_dim = case.head_dim if rotary_dim is None else rotary_dim
        angles = np.random.default_rng(16).uniform(-3, 3, (2600, rotary_dim // 2))
        cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        for slot in inputs.slot_mapping[inputs.slot_mapping >= 0].tolist():
            for cache in (inputs.key_cache, inputs.value_cache):
                cache[slot // case.block_size, :, slot % case.block_size] = np.nan
        return cls(
            inputs,
            random_array(15, (len(inputs.q), heads * case.head_dim), case.dtype),
            cos_sin if rotary_dim else None,
            {f"{name}_norm": random_array(17, (case.head_dim,), case.dtype) for name in norms},
        )

    def rows(self, rows: slice) -> DecodeInputs:
        """Some of the rows, all with one query each, over the same caches."""
        whole, part = self.inputs, AttentionInputs(replace(self.inputs.case, rows=self.inputs.case.rows[rows]))
        part.key_cache, part.value_cache = whole.key_cache, whole.value_cache
        part.block_tables, part.slot_mapping = whole.block_tables[rows], whole.slot_mapping[rows]
        return replace(self, inputs=part, qkv=self.qkv[rows])

    def run(self, ops: Ops, *, fused: bool = True) -> tuple[Array, Array, Array]:
        """Outputs, key cache and value cache."""
        case, device = self.inputs.case, ops.device
        caches, metadata = self.inputs.caches(device), self.inputs.metadata(device)
        qkv = from_numpy(self.qkv, device)
        cos_sin = None if self.cos_sin is None else from_numpy(self.cos_sin, device)
        norms: dict[str, Any] = {name: from_numpy(weight, device) for name, weight in self.norms.items()}
        queries, out = (poisoned(self.inputs.q.shape, case.dtype, device) for _ in range(2))
        attend: dict[str, Any] = {"scale": case.scale, "sliding_window": case.sliding_window, "out": out}
        attend["soft_cap"] = case.soft_cap
        transform, heads = HeadTransform(cos_sin, **norms), case.num_heads
        if fused:
            ops.attention(qkv, *caches, metadata, transform, num_heads=heads, queries=queries, **attend)
        else:
            ops.rope_and_store(qkv, *caches, metadata, transform, num_heads=heads, out=queries)
            ops.paged_attention(queries, *caches, metadata, **attend)
        return out.numpy(), caches[0].numpy(), caches[1].numpy()
