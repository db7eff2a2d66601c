"""GET /openapi.json. Public: `routes.router`, `document.openapi_document`."""
