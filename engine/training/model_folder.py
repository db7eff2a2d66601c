"""The folder of a trained model, as the server and Hugging Face's libraries read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tessera.engine.models.fields import read_json_object
from tessera.engine.models.weights.files import SINGLE_FILE
from tessera.engine.ops.interface import Ops
from tessera.engine.tensor import empty
from tessera.engine.training.parameters import Parameters
from tessera.engine.training.tensor_files import save_tensors

# Beside the weights: configuration, tokenizer, chat template.
COPIED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "additional_chat_templates/*.jinja")
INDEX = "*.safetensors.index.json"


def save_model(folder: Path, base: Path, parameters: Parameters, ops: Ops, dtype: np.dtype[Any]) -> None:
    """Write the weights in `dtype`, and what else the folder `base` has of a model. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED:
        for path in base.glob(pattern):
            target = folder / path.relative_to(base)
            if not path.match(INDEX) and path.name != "config.json":
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    tensors = {
        name: ops.copy(tensor, out=empty(tensor.shape, dtype, ops.device))
        for name, tensor in parameters.stored().items()
    }
    save_tensors(folder / SINGLE_FILE, tensors)
    config = read_json_object(base / "config.json")
    config.pop("torch_dtype", None)
    config |= {"dtype": dtype.name, "tie_word_embeddings": parameters.config.tie_word_embeddings}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
