"""Quantised safetensors checkpoints: which scheme each module has, and its tensors as weight formats take them.

Public: `methods.read_quantisation`, which reads config.json and the files beside it; `rules.Quantisation`;
`stored.StoredMatrix`, a quantised matrix of a checkpoint; `kv_scales`, the scales of a KV cache in FP8. Another scheme
is another `stored.Scheme`.
"""
