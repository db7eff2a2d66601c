"""/v1/batches: create, list, get, cancel; and the runner that carries them out.

Public: `routes.router`, `batches.Batches`, `tables.BATCHES_SCHEMA`, `runner.BatchRunner`.
"""
