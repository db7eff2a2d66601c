"""OpenAI's API; each endpoint is a package with its routes, schema and events."""
