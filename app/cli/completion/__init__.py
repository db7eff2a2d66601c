"""Completion scripts of shells, made from the declarations of the options.

Public: `scripts.completion_script`, `options.COMPLETION_OPTIONS`.
"""
