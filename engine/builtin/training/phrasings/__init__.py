"""Phrasings of requests to the built-in model: `phrasing.Phrasings` by skill, a line each.

A skill has at least 30 phrasings in training, and at least 8 that are kept out of it. Two that differ by courtesies,
capitals or punctuation alone count as one: `phrasing.core`.
"""
