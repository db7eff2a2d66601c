"""GGUF files: container, metadata and the arithmetic of their quantised blocks.

Public: `open_gguf` for a model in one file or several, `stored_bytes`; `is_gguf` and `model_stem` of file names;
`GGUFModel`, `Metadata` and `TensorInfo`; `TENSOR_TYPES`, every `TensorType` by number; `dequantize`, which turns stored
blocks into float32, and what it is made of: `NUMBERS`, `HEADER_BYTES`, `header_of`, `weights_of`, `ZEROS` and `TABLES`;
`stop_token_ids`; in `tokenizer`, tokenizers and chat templates, which the app takes from here.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from tessera.engine.gguf.blocks import TABLES, ZEROS, dequantize, weights_of
from tessera.engine.gguf.file import TensorInfo
from tessera.engine.gguf.headers import HEADER_BYTES, header_of
from tessera.engine.gguf.metadata import Metadata
from tessera.engine.gguf.model import GGUFModel, is_gguf, model_stem, open_gguf, stored_bytes
from tessera.engine.gguf.numbers import NUMBERS
from tessera.engine.gguf.tensor_types import TENSOR_TYPES, TensorType
from tessera.engine.gguf.vocabulary import stop_token_ids

__all__ = [
    "HEADER_BYTES",
    "NUMBERS",
    "TABLES",
    "TENSOR_TYPES",
    "GGUFModel",
    "Metadata",
    "TensorInfo",
    "TensorType",
    "ZEROS",
    "dequantize",
    "header_of",
    "is_gguf",
    "model_stem",
    "open_gguf",
    "stop_token_ids",
    "stored_bytes",
    "weights_of",
]
