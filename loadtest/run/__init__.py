"""Runs and sweeps: client processes started, jobs done, records collected and summed up."""
