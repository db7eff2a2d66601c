"""HTTP without any API: bodies, auth, errors, request ids, access log, counts, streaming. Knows no model."""
