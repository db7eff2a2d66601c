"""Quantised checkpoints: formats of weights, schemes, and models that load from them."""
