"""GET /v1/models. Public: `routes.router`."""
