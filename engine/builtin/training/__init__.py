"""How the built-in model is made: corpus generators, tokenizer and the training from random weights.

Nothing here is imported when serving.
"""
