"""Server processes: start and stop, worker pool, sockets, the FastAPI application.

Public: `serve.run_server`, `application.create_app`.
"""
