"""Which model fits which GPU, and how many requests at once: from sizes of models and GPUs by the formulas here."""

from __future__ import annotations

from dataclasses import dataclass

from docs.generate.figures import MODELS, markdown_table, number, serving, with_source

GIB = 2**30
UTILIZATION = 0.9  # --gpu-memory-utilization
BUFFER_BYTES = GIB  # activations, logits, CUDA graphs and the driver's own, about
CONTEXT = 4096  # tokens of one request, prompt and completion
MESSAGE_TOKENS, MESSAGES_PER_MINUTE = 300, 1  # of a person who chats: what is generated for each message
BFLOAT16 = 2.0  # bytes
Q4_K_M = 4.85 / 8  # bytes a parameter, of a whole file


@dataclass(frozen=True)
class Model:
    """Sizes from a model's config.json; `parameters` of all its tensors."""

    name: str
    parameters: float
    num_layers: int
    num_kv_heads: int = 8
    head_dim: int = 128
    weight_bytes_per_parameter: float = BFLOAT16

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.weight_bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, in bfloat16."""
        return kv_bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim)


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, item_bytes: int = 2) -> int:
    return 2 * num_layers * num_kv_heads * head_dim * item_bytes


@dataclass(frozen=True)
class Gpu:
    """`memory` in GiB as the driver reports it, about; `bandwidth` in GB/s from the data sheet."""

    name: str
    memory: float
    bandwidth: int


SIZED_MODELS = (
    Model("Qwen3-0.6B", 0.6e9, 28),
    Model("Qwen3-4B", 4.02e9, 36),
    Model("Llama-3.1-8B", 8.03e9, 32),
    Model("Llama-3.1-8B, Q4_K_M", 8.03e9, 32, weight_bytes_per_parameter=Q4_K_M),
    Model("Qwen3-14B", 14.8e9, 40),
    Model("Qwen3-32B", 32.8e9, 64),
    Model("Qwen3-32B, Q4_K_M", 32.8e9, 64, weight_bytes_per_parameter=Q4_K_M),
    Model("Llama-3.3-70B, Q4_K_M", 70.6e9, 80, weight_bytes_per_parameter=Q4_K_M),
)
GPUS = (
    Gpu("L4, 24 GB", 22.5, 300),
    Gpu("L40S, 48 GB", 44.5, 864),
    Gpu("A100, 80 GB", 79.2, 2039),
    Gpu("H100, 80 GB", 79.2, 3350),
    Gpu("H200, 141 GB", 139.8, 4800),
)


def cache_tokens(model: Model, gpu: Gpu) -> int:
    """Tokens that the KV cache has room for; 0 where the model does not fit."""
    room = UTILIZATION * gpu.memory * GIB - model.weight_bytes - BUFFER_BYTES
    return max(int(room // model.kv_bytes_per_token), 0)


def requests_at_once(model: Model, gpu: Gpu, context: int = CONTEXT) -> int:
    """Requests of `context` tokens whose keys and values fit at the same time."""
    return cache_tokens(model, gpu) // context


def most_tokens_per_second(model: Model, gpu: Gpu) -> int:
    """Bound of a single stream: each token reads all weights once."""
    return int(gpu.bandwidth * 1e9 / model.weight_bytes)


def fit_table() -> str:
    """Requests at once, and the bound of a single stream."""
    columns = ["model", "weights GiB", "KV kB a token", *(gpu.name for gpu in GPUS)]
    rows = []
    for model in SIZED_MODELS:
        cells = [model.name, f"{model.weight_bytes / GIB:.1f}", f"{model.kv_bytes_per_token / 1000:.0f}"]
        for gpu in GPUS:
            count = requests_at_once(model, gpu)
            cells.append(f"{number(count)} ({number(most_tokens_per_second(model, gpu))})" if count else "")
        rows.append(cells)
    return markdown_table(columns, rows)


def users_table() -> str:
    """From the measured sweep: the speed that each of so many streams has, and the users that keep them busy."""
    part = serving()["streams"]
    rows = []
    for row in part["rows"]:
        throughput, streams = row["output_throughput"], row["concurrency"]
        users = int(throughput * 60 / (MESSAGE_TOKENS * MESSAGES_PER_MINUTE))
        rows.append(
            [
                MODELS[row["model"]],
                number(streams),
                number(throughput),
                number(round(throughput / streams)),
                number(row["median_ttft_ms"]),
                number(users),
            ]
        )
    rows.sort(key=lambda cells: list(MODELS.values()).index(cells[0]))
    columns = ["model", "requests at once", "tokens/s", "tokens/s of each", "TTFT ms", "users"]
    return with_source(markdown_table(columns, rows), part)


TABLES = {"sizing-fit": fit_table, "sizing-users": users_table}
