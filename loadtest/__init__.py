"""`tessera bench`: load tests over HTTP. Imports nothing of the server."""
