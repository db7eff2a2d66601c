"""The operations a forward needs, as one interface with two implementations.

Public methods check shapes, dtypes and devices, make `out` where none is given, and call the
implementation's method of the same name with an underscore. All inputs and the output live on the
implementation's device; an input from another device is an error that names both. Floating-point
work is accumulated in float32 whatever the dtype of inputs and outputs.

Letters: T tokens, R sequences, S sampled rows, H hidden size, V vocabulary, D head size, Hq query
heads, Hkv key/value heads. Only leading dimensions may be 0, and then nothing is done.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields

from engine.ops.checks import require as _require
from engine.ops.encoder_interface import EncoderOps
from engine.ops.sampling_interface import SamplingOps
from engine.tensor import FLOAT_DTYPES, Tensor, float32, int32


@dataclass(frozen=True)
class AttentionMetadata:
    """Where each token of a step belongs; tensors on the device, maxima on the host.

    A row whose context length is 0 is padding: its queries' outputs are zeros, and its place in
    `block_tables` is not looked at. A `slot_mapping` of -1 stores nothing.
    """

    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int32, block * block_size + offset
    block_tables: Tensor  # [P, W] int32
    table_rows: Tensor  # [R] int32, each row's place in block_tables
    cu_seqlens_q: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32, including this step's tokens
    max_seqlen_q: int
    max_context_len: int


class Ops(EncoderOps, SamplingOps):
    """See the module's description; `out` may be given to write into memory made beforehand."""

    # -- linear ---------------------------------------------------------------------------------

    def matmul(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        *,
        accumulate: bool = False,
    ) -> Tensor:
        """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N].

        The result has x's dtype, or float32 if `out` says so (logits). With `accumulate` it is added to
        what `out` holds (a residual stream), and rounded once.
        """
        self._check(x=x, weight=weight, bias=bias, out=out)
        self._require_product("matmul", x, weight, bias)
        _require(out is not None or not accumulate, "matmul that accumulates needs out", x, weight)
        out = self._out(out, (x.shape[0], weight.shape[0]), x.dtype, also=float32)
        if out.size:
            self._matmul(x, weight, bias, out, accumulate)
        return out

    def matmul_silu_mul(self, x: Tensor, weight: Tensor, *, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """silu(gate) * up of the product x [M, K] times weight [2 I, K] transposed -> [M, I].

        The gate's rows come first in `weight`. `gate_up` [M, 2 I] is scratch: what it holds afterwards
        is undefined.
        """
        self._check(x=x, weight=weight, gate_up=gate_up, out=out)
        self._require_product("matmul_silu_mul", x, weight, None)
        _require(weight.shape[0] % 2 == 0, "matmul_silu_mul", x, weight)
        _require(gate_up.shape == (x.shape[0], weight.shape[0]) and gate_up.dtype == x.dtype, "gate_up", gate_up, x)
        out = self._out(out, (x.shape[0], weight.shape[0] // 2), x.dtype)
        if out.size:
            self._matmul_silu_mul(x, weight, gate_up, out)
        return out

    def rmsnorm_matmul(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        normed: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """`matmul` of `rmsnorm(x, norm, eps)`; x [M, K], norm [K], `normed` [M, K] scratch."""
        self._check(x=x, norm=norm, weight=weight, bias=bias, normed=normed, out=out)
        self._require_product("rmsnorm_matmul", x, weight, bias)
        self._require_norm("rmsnorm_matmul", x, norm, normed)
        out = self._out(out, (x.shape[0], weight.shape[0]), x.dtype, also=float32)
        if out.size:
            self._rmsnorm_matmul(x, norm, eps, weight, bias, normed, out)
        return out

    def rmsnorm_matmul_silu_mul(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        *,
        normed: Tensor,
        gate_up: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """`matmul_silu_mul` of `rmsnorm(x, norm, eps)`; `normed` [M, K] and `gate_up` [M, 2 I] are scratch."""
        self._check(x=x, norm=norm, weight=weight, normed=normed, gate_up=gate_up, out=out)
        self._require_product("rmsnorm_matmul_silu_mul", x, weight, None)
        self._require_norm("rmsnorm_matmul_silu_mul", x, norm, normed)
        _require(weight.shape[0] % 2 == 0, "rmsnorm_matmul_silu_mul", x, weight)
        _require(gate_up.shape == (x.shape[0], weight.shape[0]) and gate_up.dtype == x.dtype, "gate_up", gate_up, x)
        out = self._out(out, (x.shape[0], weight.shape[0] // 2), x.dtype)
        if out.size:
            self._rmsnorm_matmul_silu_mul(x, norm, eps, weight, normed, gate_up, out)
        return out

    def _require_product(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        _require(x.ndim == 2 and weight.ndim == 2 and x.shape[1] == weight.shape[1], name, x, weight)
        _require(x.dtype == weight.dtype and x.dtype in FLOAT_DTYPES, name, x, weight)
        if bias is not None:
            _require(bias.shape == (weight.shape[0],) and bias.dtype == x.dtype, f"{name} bias", bias, weight)

    def _require_norm(self, name: str, x: Tensor, norm: Tensor, normed: Tensor) -> None:
        _require(norm.shape == x.shape[1:] and norm.dtype == x.dtype, f"{name} norm", norm, x)
        _require(normed.shape == x.shape and normed.dtype == x.dtype, f"{name} scratch", normed, x)

    # -- norms ----------------------------------------------------------------------------------

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight per row of x [T, H] (Zhang and Sennrich 2019)."""
        self._check(x=x, weight=weight, out=out)
        _require(x.ndim == 2 and weight.shape == x.shape[1:] and weight.dtype == x.dtype, "rmsnorm", x, weight)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._rmsnorm(x, weight, eps, out)
        return out

    def add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """residual += x in place, then `rmsnorm` of the residual; x and residual [T, H]."""
        self._check(x=x, residual=residual, weight=weight, out=out)
        _require(
            x.ndim == 2 and residual.shape == x.shape and residual.dtype == x.dtype,
            "add_rmsnorm",
            x,
            residual,
        )
        _require(weight.shape == x.shape[1:] and weight.dtype == x.dtype, "add_rmsnorm", x, weight)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._add_rmsnorm(x, residual, weight, eps, out)
        return out

    def layernorm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
    ) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias per row of x [T, H] (Ba et al. 2016)."""
        self._check(x=x, weight=weight, bias=bias, out=out)
        _require(x.ndim == 2 and weight.shape == x.shape[1:] and weight.dtype == x.dtype, "layernorm", x, weight)
        if bias is not None:
            _require(bias.shape == weight.shape and bias.dtype == x.dtype, "layernorm bias", bias, weight)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._layernorm(x, weight, bias, eps, out)
        return out

    # -- attention ------------------------------------------------------------------------------

    def rope_and_store(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        cos_sin: Tensor | None,
        *,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        out: Tensor | None = None,
    ) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values in the cache, return queries.

        qkv [T, (Hq + 2 Hkv) * D], each token's query, key and value heads in that order. key_cache
        and value_cache [num_blocks, Hkv, block_size, D]. cos_sin [P, rotary_dim] float32: the first
        half of a row holds cosines, the second sines; rotary pairs are (i, i + rotary_dim / 2) of a
        head's first rotary_dim elements (Su et al. 2021, half-split); None rotates nothing. q_norm
        and k_norm [D] weights of an RMSNorm over each head before the rotation. -> [T, Hq * D].
        """
        self._check(out=out)
        self._check_rope(qkv, key_cache, value_cache, metadata, cos_sin, num_heads, q_norm, k_norm)
        head_dim = key_cache.shape[3]
        out = self._out(out, (qkv.shape[0], num_heads * head_dim), qkv.dtype)
        if qkv.size:
            self._rope_and_store(qkv, key_cache, value_cache, metadata, cos_sin, num_heads, q_norm, k_norm, eps, out)
        return out

    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal softmax(q k^T * scale) v over each row's cached keys; q [T, Hq * D] -> same.

        Any mix of rows: a row's queries are its last `cu_seqlens_q[r+1] - cu_seqlens_q[r]` tokens.
        Query heads share key/value heads in groups of Hq / Hkv. With a sliding window of w a query
        sees itself and the w - 1 tokens before it.
        """
        self._check(out=out)
        self._check_attention(q, key_cache, value_cache, metadata)
        out = self._out(out, q.shape, q.dtype)
        if q.size:
            self._paged_attention(q, key_cache, value_cache, metadata, scale, sliding_window, out)
        return out

    def attention(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        cos_sin: Tensor | None,
        *,
        num_heads: int,
        scale: float,
        sliding_window: int | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        queries: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """`rope_and_store`, then `paged_attention` of what it returns; `queries` [T, Hq * D] is scratch."""
        self._check(qkv=qkv, queries=queries, out=out)
        self._check_rope(qkv, key_cache, value_cache, metadata, cos_sin, num_heads, q_norm, k_norm)
        self._check_attention(queries, key_cache, value_cache, metadata)
        shape = (qkv.shape[0], num_heads * key_cache.shape[3])
        _require(queries.shape == shape and queries.dtype == qkv.dtype, "attention scratch", queries, qkv)
        out = self._out(out, shape, qkv.dtype)
        if qkv.size:
            rope = (cos_sin, num_heads, q_norm, k_norm, eps)
            self._attention(qkv, key_cache, value_cache, metadata, *rope, scale, sliding_window, queries, out)
        return out

    def _check_rope(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        cos_sin: Tensor | None,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> None:
        self._check(qkv=qkv, key_cache=key_cache, value_cache=value_cache, cos_sin=cos_sin, q_norm=q_norm)
        self._check(k_norm=k_norm, positions=metadata.positions, slot_mapping=metadata.slot_mapping)
        num_kv_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
        width = (num_heads + 2 * num_kv_heads) * head_dim
        _require(qkv.ndim == 2 and qkv.shape[1] == width, "rope_and_store", qkv, key_cache)
        _require(key_cache.shape == value_cache.shape and key_cache.ndim == 4, "KV cache", key_cache, value_cache)
        _require(qkv.dtype == key_cache.dtype == value_cache.dtype, "rope_and_store", qkv, key_cache)
        _require(metadata.positions.shape == qkv.shape[:1], "positions", metadata.positions, qkv)
        _require(metadata.slot_mapping.shape == qkv.shape[:1], "slot_mapping", metadata.slot_mapping, qkv)
        if cos_sin is not None:
            fits = cos_sin.ndim == 2 and cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= head_dim
            _require(fits and cos_sin.dtype == float32, "cos_sin", cos_sin, key_cache)
        for norm in (q_norm, k_norm):
            if norm is not None:
                _require(norm.shape == (head_dim,) and norm.dtype == qkv.dtype, "head norm", norm, qkv)

    def _check_attention(self, q: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata) -> None:
        self._check(q=q, key_cache=key_cache, value_cache=value_cache)
        self._check(**{f.name: v for f in fields(metadata) if isinstance(v := getattr(metadata, f.name), Tensor)})
        _, num_kv_heads, _, head_dim = key_cache.shape
        _require(q.ndim == 2 and q.shape[1] % (num_kv_heads * head_dim) == 0, "paged_attention", q, key_cache)
        _require(key_cache.shape == value_cache.shape, "KV cache", key_cache, value_cache)
        _require(q.dtype == key_cache.dtype == value_cache.dtype, "paged_attention", q, key_cache)
        tables, rows = metadata.block_tables, metadata.table_rows
        _require(tables.ndim == 2 and rows.shape == metadata.context_lens.shape, "block tables", tables, rows)

    def softmax(self, x: Tensor, *, log: bool = False, out: Tensor | None = None) -> Tensor:
        """softmax (or its logarithm) over each row of x [M, N] -> [M, N] float32."""
        self._check(x=x, out=out)
        _require(x.ndim == 2 and x.dtype in FLOAT_DTYPES, "softmax", x)
        out = self._out(out, x.shape, float32)
        if x.size:
            self._softmax(x, log, out)
        return out

    # -- activations ----------------------------------------------------------------------------

    def silu_mul(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """silu(gate) * up; gate_up [T, 2 I] with the gate first -> [T, I] (Shazeer 2020)."""
        self._check(gate_up=gate_up, out=out)
        _require(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "silu_mul", gate_up)
        out = self._out(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        if out.size:
            self._silu_mul(gate_up, out)
        return out

    def gelu(self, x: Tensor, *, tanh: bool, out: Tensor | None = None) -> Tensor:
        """GELU elementwise (Hendrycks and Gimpel 2016): the tanh approximation or the exact erf form."""
        self._check(x=x, out=out)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._gelu(x, tanh, out)
        return out

    # -- elementwise and rows -------------------------------------------------------------------

    def add(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a + b of equal shape; `out` may be `a`."""
        return self._binary("add", a, b, out)

    def mul(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a * b of equal shape; `out` may be `a`."""
        return self._binary("mul", a, b, out)

    def scale(self, x: Tensor, factor: float, out: Tensor | None = None) -> Tensor:
        """x * factor; `out` may be `x`."""
        self._check(x=x, out=out)
        out = self._out(out, x.shape, x.dtype)
        if x.size:
            self._scale(x, factor, out)
        return out

    def copy(self, x: Tensor, out: Tensor) -> Tensor:
        """x into `out` of the same shape, converting between float dtypes."""
        self._check(x=x, out=out)
        _require(x.shape == out.shape and (x.dtype == out.dtype or x.dtype in FLOAT_DTYPES), "copy", x, out)
        _require(x.dtype == out.dtype or out.dtype in FLOAT_DTYPES, "copy", x, out)
        if x.size:
            self._copy(x, out)
        return out

    def embedding(
        self, ids: Tensor, table: Tensor, out: Tensor | None = None, *, sampled: Tensor | None = None
    ) -> Tensor:
        """Rows of table [V, H] chosen by ids [T] int32 -> [T, H]; an id outside 0..V-1 gives zeros.

        With `sampled` [N] int32 a negative id -1 - n stands for sampled[n], which the host may not know yet.
        """
        self._check(ids=ids, table=table, out=out, sampled=sampled)
        _require(ids.ndim == 1 and ids.dtype == int32 and table.ndim == 2, "embedding", ids, table)
        if sampled is not None:
            _require(sampled.ndim == 1 and sampled.dtype == int32, "embedding", sampled)
        out = self._out(out, (ids.shape[0], table.shape[1]), table.dtype)
        if out.size:
            self._embedding(ids, table, sampled, out)
        return out

    def scatter(self, table: Tensor, rows: Tensor, columns: Tensor | None, values: Tensor) -> None:
        """table[rows[i], columns[i]] = values[i]; table [N, W], the others [U], all int32.

        No columns means column 0. A row below 0 is skipped; no place may be named twice.
        """
        self._check(table=table, rows=rows, columns=columns, values=values)
        _require(table.ndim == 2 and table.dtype == rows.dtype == values.dtype == int32, "scatter", table, rows, values)
        _require(rows.ndim == 1 and rows.shape == values.shape, "scatter", rows, values)
        if columns is not None:
            _require(columns.shape == rows.shape and columns.dtype == int32, "scatter", columns, rows)
        if rows.size:
            self._scatter(table, rows, columns, values)

    def fill_normal(self, out: Tensor, *, std: float, seed: int, mean: float = 0.0) -> Tensor:
        """Normal random numbers from Philox keyed by `seed` and element index (dummy weights)."""
        self._check(out=out)
        if out.size:
            self._fill_normal(out, mean, std, seed)
        return out

    def _binary(self, name: str, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        self._check(a=a, b=b, out=out)
        _require(a.shape == b.shape and a.dtype == b.dtype, name, a, b)
        out = self._out(out, a.shape, a.dtype)
        if a.size:
            (self._add if name == "add" else self._mul)(a, b, out)
        return out

    # -- implementations ------------------------------------------------------------------------

    @abstractmethod
    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool) -> None: ...

    # What follows combines other operations; an implementation that can fuse them overrides it.

    def _matmul_silu_mul(self, x: Tensor, weight: Tensor, gate_up: Tensor, out: Tensor) -> None:
        self._matmul(x, weight, None, gate_up, accumulate=False)
        self._silu_mul(gate_up, out)

    def _rmsnorm_matmul(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, normed: Tensor, out: Tensor
    ) -> None:
        self._rmsnorm(x, norm, eps, normed)
        self._matmul(normed, weight, bias, out, accumulate=False)

    def _rmsnorm_matmul_silu_mul(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, normed: Tensor, gate_up: Tensor, out: Tensor
    ) -> None:
        self._rmsnorm(x, norm, eps, normed)
        self._matmul_silu_mul(normed, weight, gate_up, out)

    def _attention(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        cos_sin: Tensor | None,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        scale: float,
        sliding_window: int | None,
        queries: Tensor,
        out: Tensor,
    ) -> None:
        self._rope_and_store(qkv, key_cache, value_cache, metadata, cos_sin, num_heads, q_norm, k_norm, eps, queries)
        self._paged_attention(queries, key_cache, value_cache, metadata, scale, sliding_window, out)

    @abstractmethod
    def _rmsnorm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    @abstractmethod
    def _add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    @abstractmethod
    def _layernorm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None: ...
    @abstractmethod
    def _rope_and_store(
        self,
        qkv: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        cos_sin: Tensor | None,
        num_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        out: Tensor,
    ) -> None: ...
    @abstractmethod
    def _paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        out: Tensor,
    ) -> None: ...
    @abstractmethod
    def _softmax(self, x: Tensor, log: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _silu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _gelu(self, x: Tensor, tanh: bool, out: Tensor) -> None: ...
    @abstractmethod
    def _add(self, a: Tensor, b: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _mul(self, a: Tensor, b: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _scale(self, x: Tensor, factor: float, out: Tensor) -> None: ...
    @abstractmethod
    def _copy(self, x: Tensor, out: Tensor) -> None: ...
    @abstractmethod
    def _embedding(self, ids: Tensor, table: Tensor, sampled: Tensor | None, out: Tensor) -> None: ...
    @abstractmethod
    def _scatter(self, table: Tensor, rows: Tensor, columns: Tensor | None, values: Tensor) -> None: ...
    @abstractmethod
    def _fill_normal(self, out: Tensor, mean: float, std: float, seed: int) -> None: ...
