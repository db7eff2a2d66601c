"""POST /tokenize and POST /detokenize. Public: `routes.router`."""
