"""Tessera on Ray Serve; `python -m tests.ray_serve` is the proof with a real cluster on this machine."""
