"""Makes the built-in model: `python -m tessera.engine.builtin.training.train --out FOLDER` on a CUDA machine with PyTorch.

Data are generated while training, by worker processes, in an order that depends on the seed alone. The
matrices are trained with Muon (Jordan et al. 2024), embeddings and norms with AdamW; the learning rate
is held, then falls linearly to zero. A held-out case counts as right if every token of the answer is the most
probable one given the tokens before it, which is what greedy decoding would produce.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tessera.engine.builtin.training.corpus import SKILLS, cases, conversations
from tessera.engine.builtin.training.render import FOLDER, render
from tessera.engine.builtin.training.tokenizer import write as write_tokenizer

Array = np.ndarray[Any, Any]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 2560,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
END_OF_TEXT = 0
IGNORED = -100


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.self_attn = Attention(
            hidden, config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        )
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class Model(nn.Module):
    """A Llama with the parameter names that checkpoints of it have (without the prefix `model.`)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        half = config["head_dim"] // 2
        frequencies = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(config["max_position_embeddings"], dtype=torch.float32)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                narrow = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config["num_hidden_layers"]) ** 0.5 if narrow else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


class Muon(torch.optim.Optimizer):
    """Momentum whose update matrix is made orthogonal by five Newton-Schulz steps, equal shapes together."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        groups = {shape: [p for p in parameters if p.shape == shape] for shape in {p.shape for p in parameters}}
        super().__init__([{"params": group} for group in groups.values()], {"lr": lr})
        self.momentum, self.weight_decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            parameters = group["params"]
            gradient = torch.stack([p.grad for p in parameters])
            state = self.state[parameters[0]]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            state["momentum"].lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp(state["momentum"], self.momentum))
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            for parameter, matrix in zip(parameters, update, strict=True):
                parameter.mul_(1 - group["lr"] * self.weight_decay)
                parameter.add_(matrix, alpha=-group["lr"] * scale)


@torch.compile
def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest orthogonal matrices [n, r, c], roughly, by the quintic iteration of Muon."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


def tokens_of(
    tokenizer: Tokenizer, pieces: list[tuple[str, bool]], of_prompt: Tokenizer | None = None
) -> tuple[list[int], list[bool]]:
    """Ids and, for each, whether it is part of an answer. Pieces are cut where tokens cannot cross."""
    ids: list[int] = []
    counted: list[bool] = []
    for text, answer in pieces:
        piece = (tokenizer if answer else of_prompt or tokenizer).encode(text, add_special_tokens=False).ids
        ids += piece
        counted += [answer] * len(piece)
    return ids, counted


class Rows(torch.utils.data.IterableDataset[tuple[Array, Array]]):
    """Conversations packed end to end into rows of `length` inputs and targets."""

    def __init__(self, tokenizer_file: Path, length: int, rows: int, seed: int) -> None:
        self.tokenizer_file, self.length, self.rows, self.seed = tokenizer_file, length, rows, seed

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        worker = torch.utils.data.get_worker_info()
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        # Prompts are spelt in many ways (BPE dropout, Provilkov et al. 2020), answers in one: so every token's
        # spelling is learnt, and words never seen are taken apart as familiar ones are.
        rough = Tokenizer.from_file(str(self.tokenizer_file))
        rough.model.dropout = 0.15
        stream = conversations(self.seed * 1000 + worker.id, "train")
        worker_rng = Random(self.seed * 1000 + worker.id)
        ids: list[int] = []
        targets: list[int] = []
        size = self.length * self.rows
        while True:
            while len(ids) <= size:
                of_prompt = rough if worker_rng.random() < 0.5 else tokenizer
                piece, counted = tokens_of(tokenizer, render(next(stream)), of_prompt)
                ids += [END_OF_TEXT, *piece]
                targets += [IGNORED] + [i if c else IGNORED for i, c in zip(piece, counted, strict=True)]
            yield (
                np.asarray(ids[:size], np.int64).reshape(self.rows, self.length),
                np.asarray(targets[1 : size + 1], np.int64).reshape(self.rows, self.length),
            )
            del ids[:size], targets[:size]


def evaluate(model: nn.Module, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """Share of held-out cases of each skill whose last answer is exactly right under greedy decoding."""
    shares = {}
    for skill in SKILLS:
        encoded = []
        for case in cases(skill, seed=1, count=count):
            pieces = render(case)
            last = max(i for i, (_, answer) in enumerate(pieces) if answer)
            encoded.append(tokens_of(tokenizer, [(t, a and i == last) for i, (t, a) in enumerate(pieces[: last + 1])]))
        width = max(len(ids) for ids, _ in encoded)
        ids = torch.tensor([row + [END_OF_TEXT] * (width - len(row)) for row, _ in encoded], device="cuda")
        counted = torch.tensor([row + [False] * (width - len(row)) for _, row in encoded], device="cuda")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            predicted = model(ids).argmax(-1)
        wrong = (predicted[:, :-1] != ids[:, 1:]) & counted[:, 1:]
        shares[skill] = float((~wrong.any(1)).float().mean())
    return shares


def learning_rate(step: int, steps: int) -> float:
    """Share of the peak: 100 steps up, level, the last 60 % down to zero."""
    return min(1.0, (step + 1) / 100, (steps - step) / (0.6 * steps))


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(options.out)
    print(f"tokenizer of {tokenizer.get_vocab_size()} entries", flush=True)
    model = Model(CONFIG).cuda()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = Muon(matrices, lr=options.muon_lr)
    adam = torch.optim.AdamW(others, lr=options.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    peaks = [(muon, options.muon_lr), (adam, options.adam_lr)]
    compiled = torch.compile(model)
    loss_of = torch.compile(lambda logits, targets: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))
    rows = Rows(options.out / "tokenizer.json", options.length, options.rows, options.seed)
    batches = iter(torch.utils.data.DataLoader(rows, batch_size=None, num_workers=options.workers, prefetch_factor=8))
    start = time.perf_counter()
    for step in range(options.steps):
        inputs, targets = (tensor.cuda(non_blocking=True) for tensor in next(batches))
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(compiled(inputs), targets)
        loss.backward()
        for optimizer, peak in peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate(step, options.steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == options.steps - 1:
            seconds = time.perf_counter() - start
            rate = (step + 1) * options.rows * options.length / seconds
            print(f"step {step} loss {loss.item():.4f} {seconds:.0f} s {rate / 1e6:.2f} M tokens/s", flush=True)
        if options.evaluate_every and (step + 1) % options.evaluate_every == 0:
            _print_shares(evaluate(model, tokenizer, 100))
    model.to(torch.bfloat16)
    save(model, options.out)
    _print_shares(evaluate(model, tokenizer, 300))


def _print_shares(shares: dict[str, float]) -> None:
    print("  ".join(f"{skill} {share:.1%}" for skill, share in shares.items()), flush=True)


def save(model: nn.Module, folder: Path) -> None:
    """Weights, config.json and generation_config.json, as a Hugging Face folder has them."""
    weights = {f"model.{name}": p.detach().bfloat16().contiguous().cpu() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"eos_token_id": [CONFIG["eos_token_id"]], "do_sample": False, "temperature": 0.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write")
    parser.add_argument("--steps", type=int, default=9500)
    parser.add_argument("--rows", type=int, default=64, help="rows a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--evaluate-every", type=int, default=1000, help="steps; 0 evaluates at the end only")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
