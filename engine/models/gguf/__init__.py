"""Models in GGUF files by the names that Hugging Face gives to the same.

Public: `read_config`, the metadata as a config.json object; `TensorNames`, where each weight lies.
"""
