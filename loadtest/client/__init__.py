"""HTTP clients that send a run's requests and record their times."""
