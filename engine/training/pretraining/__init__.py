"""Training from random weights.

Public: `muon.Muon`, `groups.OptimizerGroups`, and `stream.ExampleStream` of endless examples.
"""
