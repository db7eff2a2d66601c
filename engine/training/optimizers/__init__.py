"""Optimisers over a model's parameters.

Public: `optimizer.Optimizer`, `adamw.AdamW`, `muon.Muon`, `groups.OptimizerGroups`.
"""
