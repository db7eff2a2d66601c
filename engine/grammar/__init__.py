"""Grammars for structured output: compiled beside the steps, applied as token masks."""
