"""Requests of a run: prompts, lengths, arrival times, JSON bodies."""
