"""How fast weights get from the page cache to the device.

    python -m tests.bench.weights llama-8b --layers 8

writes a checkpoint of random bits, reads it once to have it in the page cache, and times `load_weights`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from tessera.engine.cuda.device import CudaDevice
from tessera.engine.models.config import load_config
from tessera.engine.models.weights.loader import load_weights
from tessera.engine.ops.cuda import CudaOps
from tessera.engine.tensor import bfloat16
from tests.bench.models import CONFIGS, write_model


def write_checkpoint(folder: Path, num_layers: int) -> int:
    """model.safetensors beside config.json, which is cut to `num_layers`; -> its bytes."""
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(num_layers):
        name = f"model.layers.{layer}."
        shapes |= {
            name + "self_attn.q_proj.weight": (queries, hidden),
            name + "self_attn.k_proj.weight": (keys, hidden),
            name + "self_attn.v_proj.weight": (keys, hidden),
            name + "self_attn.o_proj.weight": (hidden, queries),
            name + "mlp.gate_proj.weight": (inner, hidden),
            name + "mlp.up_proj.weight": (inner, hidden),
            name + "mlp.down_proj.weight": (hidden, inner),
            name + "input_layernorm.weight": (hidden,),
            name + "post_attention_layernorm.weight": (hidden,),
        }
        if config["model_type"] == "qwen3":
            shapes |= {name + f"self_attn.{which}_norm.weight": (head_dim,) for which in "qk"}
    header, end = {}, 0
    for tensor, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    piece = np.random.default_rng(0).integers(0, 255, 1 << 24, np.uint8).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, end, len(piece)):
            file.write(piece[: min(len(piece), end - start)])
    return end


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weights", description=__doc__)
    parser.add_argument("model", choices=tuple(CONFIGS))
    parser.add_argument("--layers", type=int, default=8, help="written (%(default)s)")
    options = parser.parse_args()
    device = CudaDevice()
    with tempfile.TemporaryDirectory() as work:
        folder = write_model(Path(work), options.model)
        nbytes = write_checkpoint(folder, options.layers)
        (folder / "model.safetensors").read_bytes()
        config = load_config(folder)
        for _ in range(2):
            begin = time.perf_counter()
            load_weights(folder, config, bfloat16, CudaOps(device))
            seconds = time.perf_counter() - begin
            print(f"{nbytes / 1e9:.2f} GB in {seconds:.2f} s: {nbytes / 1e9 / seconds:.1f} GB/s")


if __name__ == "__main__":
    main()
