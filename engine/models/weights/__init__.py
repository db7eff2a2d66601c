"""Checkpoints: safetensors, conversion and loading onto a device."""
