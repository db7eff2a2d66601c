"""GGUF files: container, metadata and the arithmetic of their quantised blocks.

Public, by module: `names` for `is_gguf` and `model_stem` of file names, without NumPy; `model` for `open_gguf`, a model
in one file or several, `GGUFModel` and `stored_bytes`; `file.TensorInfo` and `metadata.Metadata`; `tensor_types` for
`TENSOR_TYPES`, every `TensorType` by number; `blocks.dequantize`, which turns stored blocks into float32,
and what it is made of in `blocks`, `numbers` and `headers`;
`vocabulary.stop_token_ids`; `tokenizer` and `sampling`, of which the app takes tokenizers, chat templates and defaults.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
