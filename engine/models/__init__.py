"""Models: configurations, weights, and the forwards made of block specifications.

Public: `config.load_config` and `ModelConfig`; `weights.loader.load_weights` and `weights.dummy.dummy_weights`;
`decoder.Decoder` with `buffers.StepBuffers` and `kv_cache.KVCache`; `encoder.Encoder`; `pooling`. Architectures are
entries of `registry`, which `layers` turns into the `specs` that `blocks` runs.
"""
