"""The API's own description at /openapi.json."""
