"""Operations with a backward: each runs on the device and records itself.

Shapes and formulas are those of `engine.ops.interface.Ops` and `engine.ops.training.interface.TrainingOps`, whose
errors come through.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.engine.autograd.tape import Tape
from tessera.engine.autograd.variable import Variable
from tessera.engine.formats import LinearWeight
from tessera.engine.ops.make import make_ops
from tessera.engine.ops.training.interface import PackedSequences
from tessera.engine.ops.training.make import make_training_ops
from tessera.engine.tensor import Device, Tensor, empty, float32, from_numpy, zeros


class Functions(Tape):
    """A device's differentiable operations, and their tape."""

    @classmethod
    def on(cls, device: Device) -> Functions:
        """Raises: ConfigError where the device has no backward operations."""
        ops = make_ops(device)
        return cls(ops, make_training_ops(ops))

    def variable(self, array: np.ndarray[Any, Any], *, requires_grad: bool = True) -> Variable:
        """A leaf on the device with a copy of the array."""
        return Variable(from_numpy(np.ascontiguousarray(array), self.device), requires_grad)

    # -- products and rows ----------------------------------------------------------------------

    def matmul(self, x: Variable, weight: Variable, bias: Variable | None = None) -> Variable:
        """x [M, K] times weight [N, K] transposed, plus bias [N]."""
        training = self.training
        value = self.ops.matmul(x.value, weight.value, None if bias is None else bias.value)

        def backward(dy: Tensor) -> None:
            if x.requires_grad:
                self.add_gradient(x, training.matmul_input_gradient(dy, weight.value))
            if weight.requires_grad:
                out, accumulate = self.weight_gradient(weight)
                training.matmul_weight_gradient(dy, x.value, out, accumulate=accumulate)
            if bias is not None and bias.requires_grad:
                out, accumulate = self.weight_gradient(bias)
                training.sum_rows(dy, out, accumulate=accumulate)

        return self.record(value, (x, weight, bias), backward)

    def frozen_linear(self, x: Variable, weight: LinearWeight) -> Variable:
        """x [M, K] times a weight [N, K] of any format transposed, plus its bias; the weight gets no gradient.

        Where the format rounds x, the gradient is that of the product without it.
        """

        def backward(dy: Tensor) -> None:
            self.add_gradient(x, self.training.matmul_input_gradient(dy, self.ops.dequantize(weight, dy.dtype)))

        return self.record(self.ops.linear(x.value, weight), (x,), backward)

    def embedding(self, ids: Tensor, table: Variable) -> Variable:
        """Rows of table [V, H] chosen by ids [T] int32."""

        def backward(dy: Tensor) -> None:
            out = self.zeroed_weight_gradient(table)
            assert out is not None
            self.training.embedding_gradient(dy, ids, out)

        return self.record(self.ops.embedding(ids, table.value), (table,), backward)

    def columns(self, x: Variable, start: int, stop: int) -> Variable:
        """Columns start..stop-1 of x [M, N]."""

        def backward(dy: Tensor) -> None:
            widened = zeros(x.shape, dy.dtype, self.device)
            self.add_gradient(x, self.training.add_columns(widened, dy, start, out=widened))

        return self.record(self.training.columns(x.value, start, stop), (x,), backward)

    def join_columns(self, *parts: Variable) -> Variable:
        """Parts [M, N_i] side by side."""

        def backward(dy: Tensor) -> None:
            start = 0
            for part in parts:
                stop = start + part.shape[1]
                if part.requires_grad:
                    self.add_gradient(part, self.training.columns(dy, start, stop))
                start = stop

        return self.record(self.training.join_columns([part.value for part in parts]), parts, backward)

    def add_columns(
        self, x: Variable, part: Variable, start: int, factor: float = 1.0, *, in_place: bool = False
    ) -> Variable:
        """x [M, N] with factor * part [M, n] added to the columns from `start` on.

        `in_place` writes to x's memory: for an x that nothing else reads, neither later nor in a backward, such as a
        product.
        """

        def backward(dy: Tensor) -> None:
            self.add_gradient(x, dy)
            if part.requires_grad:
                stop = start + part.shape[1]
                self.add_gradient(part, self.training.columns(dy, start, stop, factor=factor))

        out = x.value if in_place else None
        value = self.training.add_columns(x.value, part.value, start, factor=factor, out=out)
        return self.record(value, (x, part), backward)

    def view(self, x: Variable, *shape: int) -> Variable:
        """The same elements under another shape."""
        return self.record(x.value.view(*shape), (x,), lambda dy: self.add_gradient(x, dy.view(*x.shape)))

    # -- elementwise ----------------------------------------------------------------------------

    # Two of different shapes are broadcast as NumPy does it.

    def add(self, a: Variable, b: Variable) -> Variable:
        """a + b, such as a residual."""
        a, b = self._alike(a, b)

        def backward(dy: Tensor) -> None:
            self.add_gradient(a, dy)
            self.add_gradient(b, dy)

        return self.record(self.ops.add(a.value, b.value), (a, b), backward)

    def add_row(self, x: Variable, row: Variable) -> Variable:
        """row [N] added to every row of x [M, N]."""

        def backward(dy: Tensor) -> None:
            self.add_gradient(x, dy)
            if row.requires_grad:
                out, accumulate = self.weight_gradient(row)
                self.training.sum_rows(dy, out, accumulate=accumulate)

        return self.record(self.training.add_row(x.value, row.value), (x, row), backward)

    def sub(self, a: Variable, b: Variable) -> Variable:
        """a - b."""
        a, b = self._alike(a, b)

        def backward(dy: Tensor) -> None:
            self.add_gradient(a, dy)
            if b.requires_grad:
                self.add_gradient(b, self.ops.scale(dy, -1.0))

        return self.record(self.training.sub(a.value, b.value), (a, b), backward)

    def mul(self, a: Variable, b: Variable) -> Variable:
        """a * b."""
        a, b = self._alike(a, b)

        def backward(dy: Tensor) -> None:
            if a.requires_grad:
                self.add_gradient(a, self.ops.mul(dy, b.value))
            if b.requires_grad:
                self.add_gradient(b, self.ops.mul(dy, a.value))

        return self.record(self.ops.mul(a.value, b.value), (a, b), backward)

    def div(self, a: Variable, b: Variable) -> Variable:
        """a / b."""
        a, b = self._alike(a, b)
        value = self.training.div(a.value, b.value)

        def backward(dy: Tensor) -> None:
            da = self.training.div(dy, b.value)
            self.add_gradient(a, da)
            if b.requires_grad:
                self.add_gradient(b, self.ops.scale(self.ops.mul(da, value), -1.0))

        return self.record(value, (a, b), backward)

    def scale(self, x: Variable, factor: float) -> Variable:
        """x * factor."""
        value = self.ops.scale(x.value, factor)
        return self.record(value, (x,), lambda dy: self.add_gradient(x, self.ops.scale(dy, factor)))

    def sum(self, x: Variable) -> Variable:
        """The sum of all elements, [1] float32."""

        def backward(dy: Tensor) -> None:
            self.add_gradient(x, self.training.broadcast(dy, out=empty(x.shape, x.value.dtype, self.device)))

        return self.record(self.training.sum(x.value), (x,), backward)

    def _alike(self, a: Variable, b: Variable) -> tuple[Variable, Variable]:
        """Both in the shape that they are broadcast to; as they are where there is none, which operations refuse."""
        if a.shape == b.shape:
            return a, b
        try:
            shape = np.broadcast_shapes(a.shape, b.shape)
        except ValueError:
            return a, b
        return self._broadcast(a, shape), self._broadcast(b, shape)

    def _broadcast(self, x: Variable, shape: tuple[int, ...]) -> Variable:
        """x as a table of rows, the last axes that stay, each looked up as often as it is repeated."""
        if x.shape == shape:
            return x
        same = 0
        while same < len(x.shape) and x.shape[-1 - same] == shape[-1 - same]:
            same += 1
        outer = x.shape[: len(x.shape) - same]
        width, num_rows = math.prod(shape[len(shape) - same :]), math.prod(outer)
        ids = np.broadcast_to(np.arange(num_rows, dtype=np.int32).reshape(outer), shape[: len(shape) - same])
        rows = self.embedding(from_numpy(ids.reshape(-1), self.device), self.view(x, num_rows, width))
        return self.view(rows, *shape)

    # -- norms and activations ------------------------------------------------------------------

    def rmsnorm(self, x: Variable, weight: Variable, eps: float) -> Variable:
        """x / sqrt(mean(x^2) + eps) * weight per row of x [T, H]."""

        def backward(dy: Tensor) -> None:
            out = self.zeroed_weight_gradient(weight)
            self.add_gradient(x, self.training.rmsnorm_gradient(dy, x.value, weight.value, eps, weight_gradient=out))

        return self.record(self.ops.rmsnorm(x.value, weight.value, eps), (x, weight), backward)

    def layernorm(self, x: Variable, weight: Variable, bias: Variable | None, eps: float) -> Variable:
        """(x - mean) / sqrt(var + eps) * weight + bias per row of x [T, H]."""
        value = self.ops.layernorm(x.value, weight.value, None if bias is None else bias.value, eps)

        def backward(dy: Tensor) -> None:
            out = self.zeroed_weight_gradient(weight)
            self.add_gradient(x, self.training.layernorm_gradient(dy, x.value, weight.value, eps, weight_gradient=out))
            if bias is not None and bias.requires_grad:
                out, accumulate = self.weight_gradient(bias)
                self.training.sum_rows(dy, out, accumulate=accumulate)

        return self.record(value, (x, weight, bias), backward)

    def silu(self, x: Variable) -> Variable:
        """x / (1 + exp(-x))."""
        value = self.training.silu(x.value)
        return self.record(value, (x,), lambda dy: self.add_gradient(x, self.training.silu_gradient(dy, x.value)))

    def gelu(self, x: Variable, *, tanh: bool) -> Variable:
        """GELU: the tanh approximation or the exact erf form."""

        def backward(dy: Tensor) -> None:
            self.add_gradient(x, self.training.gelu_gradient(dy, x.value, tanh=tanh))

        return self.record(self.ops.gelu(x.value, tanh=tanh), (x,), backward)

    def silu_mul(self, gate_up: Variable) -> Variable:
        """silu(gate) * up; gate_up [T, 2 I] with the gate first."""

        def backward(dy: Tensor) -> None:
            self.add_gradient(gate_up, self.training.silu_mul_gradient(dy, gate_up.value))

        return self.record(self.ops.silu_mul(gate_up.value), (gate_up,), backward)

    def gelu_mul(self, gate_up: Variable, *, tanh: bool) -> Variable:
        """gelu(gate) * up; gate_up [T, 2 I] with the gate first."""

        def backward(dy: Tensor) -> None:
            self.add_gradient(gate_up, self.training.gelu_mul_gradient(dy, gate_up.value, tanh=tanh))

        return self.record(self.ops.gelu_mul(gate_up.value, tanh=tanh), (gate_up,), backward)

    def softmax(self, x: Variable, *, log: bool = False) -> Variable:
        """softmax (or its logarithm) over each row of x [M, N], float32."""
        value = self.ops.softmax(x.value, log=log)

        def backward(dy: Tensor) -> None:
            self.add_gradient(x, self.training.softmax_gradient(dy, value, log=log))

        return self.record(value, (x,), backward)

    # -- attention ------------------------------------------------------------------------------

    def rope(
        self, x: Variable, cos_sin: Tensor, positions: Tensor, *, head_dim: int, num_rotated: int | None = None
    ) -> Variable:
        """The first `num_rotated` heads of x [T, heads * D], or all, rotated by cos_sin's row of `positions` [T]."""
        rotated = x.shape[1] // head_dim if num_rotated is None else num_rotated

        def turned(tensor: Tensor, inverse: bool) -> Tensor:
            training = self.training
            return training.rope(tensor, cos_sin, positions, head_dim=head_dim, num_rotated=rotated, inverse=inverse)

        return self.record(turned(x.value, False), (x,), lambda dy: self.add_gradient(x, turned(dy, True)))

    def packed_attention(
        self,
        qkv: Variable,
        sequences: PackedSequences,
        *,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        sliding_window: int | None = None,
    ) -> Variable:
        """Causal attention within each sequence; qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D]."""
        heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "scale": scale}
        heads["sliding_window"] = sliding_window
        out, logsumexp = self.training.packed_attention(qkv.value, sequences, **heads)

        def backward(dy: Tensor) -> None:
            dqkv = self.training.packed_attention_gradient(dy, qkv.value, out, logsumexp, sequences, **heads)
            self.add_gradient(qkv, dqkv)

        return self.record(out, (qkv,), backward)

    # -- losses ---------------------------------------------------------------------------------

    def linear_cross_entropy(
        self, x: Variable, weight: Variable, targets: Tensor, factors: Tensor, *, multiplier: float = 1.0
    ) -> Variable:
        """The sum of factors[t] * token_losses[t], [1] float32; factors [T] float32.

        The gradients are computed at once, where a backward may follow: the logits are needed for both, and their
        product is the largest of a small model.
        """
        constant = Variable(factors, requires_grad=False)
        if not self.recording or not (x.requires_grad or weight.requires_grad):
            return self.sum(self.mul(self.token_losses(x, weight, targets, multiplier=multiplier), constant))
        training = self.training
        dw = zeros(weight.shape, float32, self.device) if weight.requires_grad else None
        losses, dx = training.linear_cross_entropy_and_gradient(
            factors, x.value, weight.value, targets, multiplier=multiplier, weight_gradient=dw
        )

        def backward(dy: Tensor) -> None:
            factor = 1.0 if dy is self.one else float(dy.numpy()[0])
            if dw is not None and weight.gradient is None and factor == 1.0:
                weight.gradient = dw
            elif dw is not None:
                out = self.zeroed_weight_gradient(weight)
                assert out is not None
                training.add_to(out, dw, factor=factor)
            if factor == 1.0:
                self.add_gradient(x, dx)
            elif x.requires_grad:
                self.add_gradient(x, training.add_to(zeros(dx.shape, float32, self.device), dx, factor=factor))

        return self.record(training.sum(self.ops.mul(losses, factors)), (x, weight), backward)

    def token_losses(self, x: Variable, weight: Variable, targets: Tensor, *, multiplier: float = 1.0) -> Variable:
        """-log softmax(multiplier * x weight^T)[t, targets[t]], [T] float32.

        x [T, H], weight [V, H], targets [T] int32 (outside 0..V-1: no loss).
        """
        training = self.training
        losses, logsumexp = training.linear_cross_entropy(x.value, weight.value, targets, multiplier=multiplier)

        def backward(dy: Tensor) -> None:
            inputs = (dy, x.value, weight.value, targets, logsumexp)
            out = self.zeroed_weight_gradient(weight)
            dx = training.linear_cross_entropy_gradient(*inputs, multiplier=multiplier, weight_gradient=out)
            self.add_gradient(x, dx)

        return self.record(losses, (x, weight), backward)
