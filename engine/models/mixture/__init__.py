"""The half of a layer that is a mixture of experts.

Public: `mixture.Mixture`; `buffers`, what it computes in; `stored`, its weights in checkpoints.
"""
