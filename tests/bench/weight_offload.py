"""Decoding with a part of the weights in host memory: tokens a second, and the share of the link's rate.

    python -m tests.bench.weight_offload [llama-8b llama-70b]

drives the engine alone, in this process, with random weights: Llama-8B with half of its layers in host memory, and
Llama-70B with as many as `auto` takes, each with 1 and with 64 streams. The link's rate is that of one copy of 1 GiB
from page-locked memory. The last lines are JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, Literal

from tessera.engine.contract.config import EngineConfig
from tessera.engine.contract.messages import AddRequest
from tessera.engine.contract.sampling_params import SamplingParams
from tessera.engine.core.core import EngineCore
from tessera.engine.ipc.load import load_engine
from tessera.engine.models.config import DTYPES, load_config
from tessera.engine.models.weights.build import layer_bytes
from tests.bench.models import LLAMA_8B, LLAMA_70B, write_model

BLOCK_SIZE: Literal[16] = 16
CLIENT = b"bench"
GIB = 2**30
LINK_BYTES = GIB
STREAMS = (1, 64)
MODELS = {"llama-8b": LLAMA_8B, "llama-70b": LLAMA_70B}


def link_rate() -> float:
    """Bytes a second of a copy to the device; the best of five."""
    from tessera.engine.cuda.device import CudaDevice

    device = CudaDevice()
    memory, target = device.pinned(LINK_BYTES), device.allocate(LINK_BYTES)
    best = 0.0
    for _ in range(5):
        device.synchronize()
        start = time.perf_counter()
        device.upload_async(target.pointer, memory.array)
        device.synchronize()
        best = max(best, LINK_BYTES / (time.perf_counter() - start))
    return best


def decode(core: EngineCore, streams: int, given: argparse.Namespace) -> dict[str, float]:
    """All streams at once; timed from the step after which each has its first token."""
    rng = random.Random(given.seed)
    for number in range(streams):
        prompt = array("i", [rng.randrange(3, 200) for _ in range(given.input_tokens)])
        params = SamplingParams(max_tokens=given.output_tokens, temperature=0.0, ignore_eos=True)
        core.add_request(AddRequest(f"{streams}/{number}", prompt, params, time.monotonic()), CLIENT)
    counts: dict[str, int] = {}
    begun = begin_tokens = begin_steps = 0.0
    while core.has_work:
        for output in core.step().get(CLIENT, []):
            assert output.error is None, output.error
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
        if not begun and len(counts) == streams:
            begun, begin_tokens, begin_steps = time.perf_counter(), sum(counts.values()), core.num_steps
    seconds = time.perf_counter() - begun
    return {
        "tokens_per_second": (sum(counts.values()) - begin_tokens) / seconds,
        "steps_per_second": (core.num_steps - begin_steps) / seconds,
    }


def measure(name: str, folder: Path, rate: float, given: argparse.Namespace) -> dict[str, Any]:
    model = load_config(folder)
    length = given.input_tokens + given.output_tokens
    if given.offload_gib is not None:
        size = given.offload_gib
    elif name == "llama-8b":
        sizes = layer_bytes(model, DTYPES["float32" if given.device == "cpu" else "bfloat16"])
        size = f"{(sum(sizes) / 2 + sizes[0] / 8) / GIB:.6f}"  # half of them and the alignment of their tensors
    else:
        size = "auto"
    config = EngineConfig(
        model=str(folder),
        device=given.device,
        load_format="dummy",
        seed=1,
        block_size=BLOCK_SIZE,
        gpu_memory_utilization=given.utilization,
        num_kv_blocks=max(STREAMS) * (-(-length // BLOCK_SIZE) + 1),
        max_num_seqs=max(STREAMS),
        max_num_batched_tokens=2048,
        max_model_len=length,
        cpu_offload_gib=size,
    )
    start = time.perf_counter()
    engine = load_engine(config, lambda stage, done, total: None)
    core, offload = engine.core, engine.info.weight_offload
    assert isinstance(core, EngineCore)
    found: dict[str, Any] = {
        "model": name,
        "start_seconds": round(time.perf_counter() - start, 1),
        "layers": 0 if offload is None else offload.num_layers,
        "offloaded_gb": 0 if offload is None else round(offload.nbytes / 1e9, 2),
        "link_gb_per_second": round(rate / 1e9, 2),
    }
    decode(core, 1, given)
    for streams in STREAMS:
        result = decode(core, streams, given)
        copied = result["steps_per_second"] * (0 if offload is None else offload.nbytes)
        found[f"tokens_per_second_{streams}"] = round(result["tokens_per_second"], 2)
        found[f"link_share_{streams}"] = round(copied / rate, 3) if rate else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weight_offload", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layers", type=int, help="of the model, for a smaller device")
    parser.add_argument("--tiny", action="store_true", help="narrow layers, to try this on a CPU")
    parser.add_argument("--offload-gib", help="instead of half or auto")
    parser.add_argument("--utilization", type=float, default=0.95)
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rate = link_rate() if given.device == "cuda" else 0.0
    results = []
    with tempfile.TemporaryDirectory() as root:
        for name in given.models:
            config = dict(MODELS[name])
            if given.layers:
                config["num_hidden_layers"] = given.layers
            if given.tiny:
                config |= {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
                config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
            folder = write_model(Path(root), name, config)
            results.append(measure(name, folder, rate, given))
            gc.collect()
    for result in results:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
