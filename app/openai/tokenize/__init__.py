"""POST /tokenize and POST /detokenize."""
