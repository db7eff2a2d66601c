"""`tessera bench`: load tests over HTTP. Imports nothing of the server.

Public: `bench.run_bench`, `bench_options.BENCH_OPTIONS`, `run.load_run.run_load`.
"""
