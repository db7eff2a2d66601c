"""Ranks that share a model (tensor parallelism), run as one.

Public: `parallel_runner.ParallelRunner` and `make_cpu_runner`; `metrics.RankMetrics`.
"""
