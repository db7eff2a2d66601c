"""The corpus generators and tokenizer of the built-in model, and its training from random weights.

Nothing here is imported when serving.
"""
