"""POST /v1/chat/completions. Public: `routes.router`."""
