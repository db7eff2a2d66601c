"""/v1/responses: create, retrieve, delete, input items. Public: `routes.router`, `store.ResponseStore`."""
