"""POST /v1/embeddings. Public: `routes.router`, `models.Embeddings`."""
