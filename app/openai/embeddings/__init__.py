"""POST /v1/embeddings. Public: `routes.router`, `embedders.Embeddings`."""
