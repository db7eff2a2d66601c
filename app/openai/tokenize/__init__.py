"""POST /tokenize and POST /detokenize, GET /tokenizer_info. Public: `routes.router`."""
