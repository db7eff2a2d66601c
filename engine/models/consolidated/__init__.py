"""Folders in Mistral's own form: params.json and consolidated.safetensors in the place of config.json and weights.

Public: `params.is_consolidated` and `params.read_params`, which says what config.json would; `names.CONSOLIDATED`, what
the tensors are called and how their rows lie.
"""
