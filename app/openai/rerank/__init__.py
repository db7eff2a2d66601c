"""POST /v1/rerank, /v1/score and /v1/classify, and their older paths. Public: `routes.router`, `scorers.Scorers`."""
