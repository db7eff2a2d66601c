"""Scheduling without device code: core loop, scheduler, sequences, KV blocks, step batches.

Public: `core.EngineCore`, `account.Accounts`, `embedder.Embedder` and `EmbeddingOnlyCore`, `metrics.EngineMetrics`, and
a step's arrays in `step_batch`.
"""
