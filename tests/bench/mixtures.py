"""Mixtures of experts: their benchmark architectures, and microseconds of their kernels.

    python -m tests.bench.mixtures [qwen3-30b-a3b gpt-oss-20b]

measures, for each number of tokens, the router (norm, product, choice, order), both products by the experts' weights,
and their sum, each by itself; all of them in turn, as a layer has them, where each begins while the one in front ends;
and the same products in a loop, a dense one for each expert that has tokens. The choice is uniform, as random router
weights make it. Loads over HTTP: `python -m tests.bench --only loads --model qwen3-30b-a3b`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.formats import PACKED_FORMATS, LinearWeight, WeightPart
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.ops.linear_interface import Activation, RMSNorm
from tessera.engine.ops.moe_interface import Routed, Routing
from tessera.engine.tensor import Tensor, bfloat16, empty, float32, int32
from tests.bench.kernels import measure

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "attention_bias": True,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURES = {"qwen3-30b-a3b": QWEN3_30B_A3B, "gpt-oss-20b": GPT_OSS_20B}
MXFP4_BYTES = 17 / 32  # of an element


def mixture_decode_bytes(config: dict[str, Any], streams: int) -> int:
    """Bytes of weights that a decode step of so many tokens reads, where their experts are chosen uniformly."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    experts = config.get("num_experts") or config["num_local_experts"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    touched = experts * (1 - (1 - config["num_experts_per_tok"] / experts) ** streams)
    element = MXFP4_BYTES if "quantization_config" in config else 2
    layer = 2 * hidden * config["head_dim"] * (2 * heads + 2 * kv_heads) + 2 * hidden * experts
    layer += touched * 3 * hidden * inner * element
    return int(config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden)


class Shape(NamedTuple):
    """One mixture's sizes; `in_blocks`: its experts are MXFP4."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    activation: Activation
    in_blocks: bool


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, "silu_mul", in_blocks=False),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, "clamped_swiglu_mul", in_blocks=True),
}
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COPIES = 2  # of the weights, so that the L2 cache holds none
CALLS = 8


class MixtureBench:
    """Weights and memory for measurements of one shape."""

    def __init__(self, ops: CudaOps, shape: Shape) -> None:
        self.ops, self.shape = ops, shape
        sizes = {"up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
        self.weights = [
            {name: self._weight(shape.num_experts * rows, columns) for name, (rows, columns) in sizes.items()}
            for _ in range(COPIES)
        ]
        experts = [(weight, shape.num_experts) for copy in self.weights for weight in copy.values()]
        ops.reserve_experts(experts, np.dtype(bfloat16))
        # A dense product for each expert takes dense weights, also where the mixture's are in blocks.
        self.each = {name: LinearWeight.of(self._random(rows, columns)) for name, (rows, columns) in sizes.items()}
        self.router = LinearWeight.of(self._random(shape.num_experts, shape.hidden))
        self.gains = self._random(1, shape.hidden)[0]

    def _random(self, *shape: int) -> Tensor:
        return self.ops.fill_normal(empty(shape, bfloat16, self.ops.device), std=0.05, seed=sum(shape))

    def _weight(self, rows: int, columns: int) -> LinearWeight:
        if not self.shape.in_blocks:
            return LinearWeight.of(self._random(rows, columns))
        part = WeightPart.empty(PACKED_FORMATS["MXFP4"], rows, columns, self.ops.device)
        self.ops.fill_normal(
            Tensor(part.tensors["codes"].buffer, part.tensors["codes"].shape, float32), std=1.0, seed=1
        )
        headers = part.tensors["headers"]
        headers.upload(np.full(headers.shape, 0x78787878, np.uint32))
        return LinearWeight((part,))

    def measure(self, num_tokens: int) -> dict[str, float]:
        """Microseconds by what is measured."""
        ops, shape, device = self.ops, self.shape, self.ops.device
        pairs = num_tokens * shape.top_k
        routing = Routing("softmax", shape.top_k, normalised=True)
        routed = Routed(
            empty((num_tokens, shape.top_k), int32, device),
            empty((num_tokens, shape.top_k), float32, device),
            empty((shape.num_experts + 1,), int32, device),
            *(empty((pairs,), int32, device) for _ in range(2)),
        )
        x = self._random(num_tokens, shape.hidden)
        logits = empty((num_tokens, shape.num_experts), float32, device)
        product, rows = (empty((pairs, width), bfloat16, device) for width in (2 * shape.inner, shape.hidden))
        activated, out = empty((pairs, shape.inner), bfloat16, device), self._random(num_tokens, shape.hidden)

        norm = RMSNorm(self.gains, 1e-6, empty(x.shape, bfloat16, device))

        def route() -> None:
            if not ops.route_rows(x, self.router, routing, routed, norm=norm):
                ops.rmsnorm(x, norm.weight, norm.eps, out=norm.scratch)
                ops.linear(norm.scratch, self.router, out=logits)
                ops.route(logits, routing, routed)

        def up(weight: LinearWeight) -> None:
            ops.expert_up(x, weight, routed, shape.activation, product=product, gathered=rows, out=activated)

        def layer(weights: dict[str, LinearWeight]) -> None:
            route()
            up(weights["up"])
            ops.expert_down(activated, weights["down"], routed, rows)
            ops.combine_experts(rows, routed, out, accumulate=True)

        route()
        device.synchronize()
        counts = np.diff(routed.offsets.numpy())
        calls: dict[str, list[Callable[[], object]]] = {
            "router": [route] * CALLS,
            "up": [partial(up, self.weights[i % COPIES]["up"]) for i in range(CALLS)],
            "down": [
                partial(ops.expert_down, activated, self.weights[i % COPIES]["down"], routed, rows)
                for i in range(CALLS)
            ],
            "combine": [partial(ops.combine_experts, rows, routed, out, accumulate=True)] * CALLS,
            "in turn": [partial(layer, self.weights[i % COPIES]) for i in range(CALLS)],
            "dense loop": [partial(self._loop, counts, product, rows, activated)],
        }
        found = {name: measure(device, list_of) for name, list_of in calls.items()}
        flops = 2 * pairs * 3 * shape.hidden * shape.inner
        return {**found, "TFLOP/s": flops / (found["up"] + found["down"]) / 1e6}

    def _loop(self, counts: Any, product: Tensor, rows: Tensor, activated: Tensor) -> None:
        """Both products and the activation, expert after expert, by one expert's weights."""
        start = 0
        for count in counts.tolist():
            if count:
                some = slice(start, start + count)
                self.ops.linear(rows[some], self.each["up"], out=product[some])
                self.ops.linear(activated[some], self.each["down"], out=rows[some])
            start += count


def main() -> None:
    ops = CudaOps(CudaDevice())
    ops.compile(np.dtype(bfloat16))
    for name in sys.argv[1:] or SHAPES:
        bench = MixtureBench(ops, SHAPES[name])
        table = Table(title=f"{name}: microseconds of a layer's mixture, bf16")
        for column in ("tokens", "router", "up", "down", "combine", "in turn", "dense loop", "TFLOP/s"):
            table.add_column(column, justify="right")
        for num_tokens in TOKENS:
            row = bench.measure(num_tokens)
            table.add_row(str(num_tokens), *(f"{value:.1f}" for value in row.values()))
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
