"""Llama and GPT-2 in PyTorch by their formulas, and steps of its AdamW; PyTorch is handed in, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class TorchTraining:
    """A model in float32, without TF32, on the GPU where there is one.

    Args:
        config: the JSON object of the model's config.json.
        tensors: by their names in a checkpoint.
    """

    def __init__(self, torch: Any, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        self._torch = torch
        self._config = config
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tensors = {
            name: torch.tensor(array, device=self._device, requires_grad=True) for name, array in tensors.items()
        }
        self._optimizer: Any = None

    def gradients(self, batch: Array) -> tuple[float, dict[str, Array]]:
        """The mean loss of batch [B, n], and the gradients by name."""
        loss = self._loss(batch)
        found = self._torch.autograd.grad(loss, list(self._tensors.values()))
        return loss.item(), {name: each.cpu().numpy() for name, each in zip(self._tensors, found, strict=True)}

    def step(self, batch: Array, learning_rate: float, *, weight_decay: float, max_norm: float) -> float:
        """One of AdamW; -> the loss before it."""
        torch, tensors = self._torch, list(self._tensors.values())
        if self._optimizer is None:
            matrices = [tensor for tensor in tensors if tensor.ndim == 2]
            others = [tensor for tensor in tensors if tensor.ndim != 2]
            groups = [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
            self._optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8)
        self._optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors, max_norm)
        self._optimizer.step()
        return float(loss.item())

    def _loss(self, batch: Array) -> Any:
        ids = self._torch.tensor(batch.astype(np.int64), device=self._device)
        logits = self._llama(ids) if self._config["model_type"] == "llama" else self._gpt2(ids)
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        return self._torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1))

    def _attention(self, q: Any, k: Any, v: Any) -> Any:
        """Each [B, n, heads, D] -> [B, n, heads * D]; causal."""
        torch = self._torch
        group = q.shape[2] // k.shape[2]
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    def _llama(self, ids: Any) -> Any:
        torch, config, tensors = self._torch, self._config, self._tensors
        head_dim, eps = config["head_dim"], config["rms_norm_eps"]
        frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2, device=ids.device) / head_dim)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * frequencies
        cos, sin = (each[:, None] for each in (angles.cos(), angles.sin()))

        def norm(x: Any, name: str) -> Any:
            return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * tensors[name]

        def rotated(x: Any) -> Any:
            a, b = x.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        x = tensors["model.embed_tokens.weight"][ids]
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."

            def linear(x: Any, name: str, prefix: str = prefix) -> Any:
                return x @ tensors[f"{prefix}{name}.weight"].T

            normed = norm(x, f"{prefix}input_layernorm.weight")
            q, k, v = (linear(normed, f"self_attn.{each}_proj").unflatten(-1, (-1, head_dim)) for each in "qkv")
            x = x + linear(self._attention(rotated(q), rotated(k), v), "self_attn.o_proj")
            normed = norm(x, f"{prefix}post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(linear(normed, "mlp.gate_proj"))
            x = x + linear(gate * linear(normed, "mlp.up_proj"), "mlp.down_proj")
        return norm(x, "model.norm.weight") @ tensors["lm_head.weight"].T

    def _gpt2(self, ids: Any) -> Any:
        torch, config = self._torch, self._config
        root = "transformer." if "transformer.wte.weight" in self._tensors else ""
        tensors = {name.removeprefix(root): tensor for name, tensor in self._tensors.items()}

        def norm(x: Any, name: str) -> Any:
            weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
            return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, config["layer_norm_epsilon"])

        def linear(x: Any, name: str) -> Any:
            return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

        x = tensors["wte.weight"][ids] + tensors["wpe.weight"][: ids.shape[1]]
        for layer in range(config["n_layer"]):
            qkv = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn")
            q, k, v = (each.unflatten(-1, (config["n_head"], -1)) for each in qkv.chunk(3, dim=-1))
            x = x + linear(self._attention(q, k, v), f"h.{layer}.attn.c_proj")
            inner = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
            inner = torch.nn.functional.gelu(inner, approximate="tanh")
            x = x + linear(inner, f"h.{layer}.mlp.c_proj")
        return norm(x, "ln_f") @ tensors["wte.weight"].T
