"""Generates what the documentation does not state by hand.

`python -m docs.generate` writes the tables and pictures that are committed, from `docs/figures/*.json`; a test
fails when they are out of date. `hook.py` makes the API, options and rooms pages while the site is built.
"""
