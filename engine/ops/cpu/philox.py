"""Philox4x32-10, a counter-based random generator (Salmon et al. 2011), vectorised."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

UInt32Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]
UInt64Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32_10(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Four random words per counter: counter [..., 4] and key [2] or [..., 2] uint32 -> [..., 4] uint32."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _WORD_BITS) ^ c1 ^ k0
        c2 = (product0 >> _WORD_BITS) ^ c3 ^ k1
        c1 = product1 & _LOW_WORD
        c3 = product0 & _LOW_WORD
        k0 = (k0 + np.uint64(_KEY_STEPS[0])) & _LOW_WORD
        k1 = (k1 + np.uint64(_KEY_STEPS[1])) & _LOW_WORD
    words = np.empty((*c0.shape, 4), np.uint32)
    for i, word in enumerate((c0, c1, c2, c3)):
        words[..., i] = word
    return words


def keys_of_seeds(seeds: UInt64Array) -> UInt32Array:
    """The generator's keys [..., 2] for 64-bit seeds [...]: low word, high word."""
    return np.stack((seeds & _LOW_WORD, seeds >> _WORD_BITS), axis=-1).astype(np.uint32)


def key_of_seed(seed: int) -> UInt32Array:
    """The key [2] for one seed."""
    return keys_of_seeds(np.array(seed, np.uint64))
