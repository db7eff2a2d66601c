"""/v1/responses: create, retrieve, delete, input items."""
