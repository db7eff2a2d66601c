"""/v1/fine_tuning/jobs: create, list, get, cancel, pause, resume, events, checkpoints; and the runner of jobs.

Public: `routes.router`, `jobs.FineTuningJobs`, `tables.FINE_TUNING_SCHEMA`, `runner.JobRunner`.
"""
