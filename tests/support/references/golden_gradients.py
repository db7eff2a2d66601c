"""Parameters of golden_gradients.npz, shared by the script that makes it and the test; needs NumPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

# Each has something that no other has.
MODELS = (
    *("llama", "llama-tied-biases", "llama-dynamic", "llama-yarn", "mistral-window", "qwen3", "smollm3"),
    *("phi3-partial-window", "phi3-longrope-long", "llama-gelu", "starcoder2", "stablelm", "stablelm-parallel"),
    *("granite", "exaone4", "gpt2", "gpt2-variants"),
)
TRAINED = "llama-tied-biases"
STEPS = 40
ADAMW: dict[str, float] = {
    "lr": 2e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_gradient_norm": 1.0,
}
MOST_PLACES = 16


def places(size: int) -> np.ndarray[Any, Any]:
    """Flat places of a gradient's elements that are kept; some may be named twice."""
    return np.random.RandomState(size % 2**31).randint(0, size, MOST_PLACES)
