"""Reasoning: the part of a completion that precedes the answer, in the form of each family of models.

A family is one file here: its `ReasoningFormat`, and a function that knows its chat templates. `families` lists them.
Public: `families.choose_reasoning`, `format.ReasoningFormat` and `ReasoningStart`, `splitter.ReasoningSplitter`.
"""
