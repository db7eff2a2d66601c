"""Runs steps on a device: uploads, CUDA graphs, the model runner, sampling, embeddings.

Public: `model_runner.ModelRunner`, `embedding_engine.EmbeddingEngine`, `devices.select_device`.
"""
