"""Attacks on a real server, with canaries beside them and one table at the end: `python -m tests.attack`."""
