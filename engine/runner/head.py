"""The head of a model that scores: from a text's pooled vector to logits, on the host in float32.

A head takes one vector of each text, so the copy to the host and its few products cost little beside the layers'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from tessera.engine.formats import LinearWeight
from tessera.engine.models.specs import ClassifierSpec, HeadActivation
from tessera.engine.models.weights.weights import ClassifierWeights
from tessera.engine.ops.cpu.activation import gelu_erf
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import Tensor, bfloat16, empty, from_numpy

Float32Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]


class Head:
    """Rows [L, H] that a vector is multiplied by, with a bias [L] or none. Attributes: num_logits."""

    def __init__(self, rows: Float32Array, bias: Float32Array | None = None) -> None:
        self.num_logits = len(rows)
        self._rows, self._bias = rows, bias

    @np.errstate(all="ignore")
    def logits(self, pooled: Float32Array) -> Float32Array:
        """[R, L] of pooled [R, H]; both are float32."""
        return _product(pooled, self._rows, self._bias)


class ClassifierHead(Head):
    """The head of a sequence classifier."""

    def __init__(self, spec: ClassifierSpec, weights: ClassifierWeights) -> None:
        super().__init__(_matrix(weights.out), _vector(weights.out.bias))
        self._activation = None if spec.activation is None else ACTIVATIONS[spec.activation]
        if weights.dense is not None:
            self._dense, self._dense_bias = _matrix(weights.dense), _vector(weights.dense.bias)
        self._eps = None if spec.norm is None else np.float32(spec.norm.eps)
        if weights.norm is not None:
            self._norm_weight, self._norm_bias = _array(weights.norm.weight), _vector(weights.norm.bias)

    @np.errstate(all="ignore")
    def logits(self, pooled: Float32Array) -> Float32Array:
        if self._activation is not None:
            pooled = self._activation(_product(pooled, self._dense, self._dense_bias))
        if self._eps is not None:
            centred = pooled - pooled.mean(axis=1, keepdims=True)
            centred /= np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + self._eps)
            pooled = centred * self._norm_weight
            if self._norm_bias is not None:
                pooled += self._norm_bias
        return super().logits(pooled)


def token_head(lm_head: LinearWeight, yes_id: int, no_id: int, ops: Ops, multiplier: float = 1.0) -> Head:
    """The logit of one token of a vocabulary less that of another; its sigmoid is their softmax."""
    ids = from_numpy(np.array([yes_id, no_id], np.int32), ops.device)
    dtype = lm_head.dense.dtype if lm_head.dense is not None else bfloat16
    rows = empty((2, lm_head.shape[1]), dtype, ops.device)
    yes, no = ops.lookup(ids, lm_head, out=rows).numpy().astype(np.float32)
    return Head(((yes - no) * np.float32(multiplier))[None])


def _product(x: Float32Array, rows: Float32Array, bias: Float32Array | None) -> Float32Array:
    result: Float32Array = x @ rows.T
    return result if bias is None else result + bias


def _relu(x: Float32Array) -> Float32Array:
    result: Float32Array = np.maximum(x, 0)
    return result


ACTIVATIONS: dict[HeadActivation, Callable[[Float32Array], Float32Array]] = {
    "tanh": np.tanh,
    "gelu": gelu_erf,
    "relu": _relu,
}


def _matrix(weight: LinearWeight) -> Float32Array:
    assert weight.dense is not None, "a head is stored in the model's dtype"
    return _array(weight.dense)


def _vector(tensor: Tensor | None) -> Float32Array | None:
    return None if tensor is None else _array(tensor)


def _array(tensor: Tensor) -> Float32Array:
    array: Float32Array = tensor.numpy().astype(np.float32)
    return array
