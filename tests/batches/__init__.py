"""Proofs of batches at scale, by hand: `python -m tests.batches.million`."""
