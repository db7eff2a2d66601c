"""Copies between host memory and the device beside the steps: KV blocks, and layers of weights."""
