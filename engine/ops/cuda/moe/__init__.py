"""Mixtures of experts. Public: `ops.MoEOps`."""
