"""HTTP below any API: bodies, keys, errors and their dialects, request ids, access log, counts, event streams.

It knows no model. Public: `body.read_json_object` and `json_response`, `streaming.EventStream`, `dialect.Dialect`,
`description.Description`, and the middlewares that `app.server.application` installs.
"""
