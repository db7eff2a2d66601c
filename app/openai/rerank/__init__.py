"""POST /v1/rerank, /v1/score and /v1/classify. Public: `routes.router`, `scorers.Scorers`."""
