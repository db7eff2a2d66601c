"""Grammars for structured output: compiled beside the steps, applied as token masks.

Public: `compiler.GrammarCompiler`, `constraint.TokenConstraint`, `GrammarConstraint` and `advance_constraints`.
"""
