"""Names of the files that weights are in, and what a folder or a repository without them has instead."""

from __future__ import annotations

from collections.abc import Iterable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHER_PICKLES = ("training_args.bin", "optimizer.pt", "scheduler.pt")


def why_no_weights(where: str, names: Iterable[str], wanted: tuple[str, str] = (SINGLE_FILE, INDEX_FILE)) -> str:
    """A sentence about files of which none is one of those wanted."""
    present = sorted(names)
    if ADAPTER_CONFIG in present:
        return adapter_sentence(where)
    pickled = [name for name in present if name.endswith(PICKLE_SUFFIXES) and name not in OTHER_PICKLES]
    if pickled:
        return (
            f"{where} has its weights in {pickled[0]} only, a pickle, which could run code when opened; "
            "only safetensors are read, so convert it or get the model's safetensors version"
        )
    others = [name for name in present if name.endswith(".safetensors")]
    found = f" (there is {', '.join(others[:3])})" if others else ""
    return f"{where} has neither {wanted[0]} nor {wanted[1]}{found}"


def adapter_sentence(where: str, base: object = None) -> str:
    """`base`: the model that it was trained for, where adapter_config.json says so."""
    model = base[:100] if isinstance(base, str) and base else "its base model"
    return f"{where} is a LoRA adapter, not a model: serve {model} with --lora NAME=FOLDER"
