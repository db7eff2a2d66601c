"""GGUF files: container, metadata and the arithmetic of their quantised blocks.

Public: `open_gguf` for a model in one file or several, `GGUFModel`, `Metadata` and `TensorInfo`; `TENSOR_TYPES`, every
`TensorType` by number; `dequantize`, which turns stored blocks into float32; `stop_token_ids`. The app takes
tokenizers and chat templates from here, the engine configuration and weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from tessera.engine.gguf.blocks import dequantize
from tessera.engine.gguf.file import TensorInfo
from tessera.engine.gguf.metadata import Metadata
from tessera.engine.gguf.model import GGUFModel, open_gguf
from tessera.engine.gguf.tensor_types import TENSOR_TYPES, TensorType
from tessera.engine.gguf.vocabulary import stop_token_ids

__all__ = [
    "TENSOR_TYPES",
    "GGUFModel",
    "Metadata",
    "TensorInfo",
    "TensorType",
    "dequantize",
    "open_gguf",
    "stop_token_ids",
]
