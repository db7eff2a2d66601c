"""POST /v1/completions. Public: `routes.router`."""
