"""Scheduling without device code: core loop, scheduler, sequences, KV blocks, step batches."""
