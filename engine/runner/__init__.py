"""Runs steps on a device: uploads, CUDA graphs, the model runner, sampling, embeddings."""
