"""How the built-in model was made: corpus generators, tokenizer and training script.

Nothing here is imported when serving. `train.py` alone needs PyTorch.
"""
