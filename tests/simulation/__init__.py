"""Whole histories of a server on virtual time, each decided by its seed: `python -m tests.simulation`."""
