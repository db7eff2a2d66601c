"""Device tensors to and from safetensors files.

Format: see `tessera.engine.models.weights.safetensors`. A file is complete or absent: it is written beside its place,
brought to the disk, and renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tessera.engine.contract.errors import TesseraError
from tessera.engine.models.weights.safetensors import DTYPES, SafetensorsFile
from tessera.engine.tensor import Device, Tensor, from_numpy

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 64  # bytes, of where the tensors begin


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name.

    Raises: TesseraError naming a tensor whose dtype the format does not know; OSError.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TesseraError(f"the tensor {name} is {tensor.dtype}, which safetensors files cannot hold")
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_tensors(path: Path, device: Device) -> dict[str, Tensor]:
    """All tensors of a file on the device. Raises: ModelError naming the file where it is malformed."""
    file = SafetensorsFile(path)
    return {name: from_numpy(file.tensor(name), device) for name in file.names}
