"""Text and tokens: tokenizer, detokenizer, chat template and its sandbox, stop strings, reasoning."""
