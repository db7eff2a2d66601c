"""Weights on the device: which ones a model has (`build`), and where they come from (`loader`, `dummy`).

Public: `weights.Weights`, `loader.load_weights`, `dummy.dummy_weights`, `build.num_weight_bytes`. Another kind of
checkpoint is another `build.WeightSource`: `checkpoint_source` reads safetensors, `gguf_source` GGUF.
"""
