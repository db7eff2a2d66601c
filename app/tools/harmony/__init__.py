"""Harmony, gpt-oss's form: completions of messages with headers, which hold reasoning, text and calls.

Public: `parser.HarmonyParser`, `syntax.HARMONY_TOOLS`.
"""
