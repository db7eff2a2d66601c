"""Reverse-mode differentiation over device tensors.

Public: `functions.Functions`, operations with a backward that record themselves on a tape; `variable.Variable`, what
they take and return; `arrays.value_and_gradients` for NumPy arrays. The operations are those of `engine.ops` and
`engine.ops.training`, so a device that implements both can differentiate.
"""
