"""A fleet of a thousand replicas on virtual time: routing policies compared on conversation trees, bursts and failures.

`python -m tests.simulation.routing` runs it; a seed is a whole history.
"""
