"""Ranks that share a model (tensor parallelism), run as one.

Public: `parallel_runner.ParallelRunner` and `make_cpu_runner`; `cuda_runner.make_cuda_runner`; `metrics.RankMetrics`.
"""
