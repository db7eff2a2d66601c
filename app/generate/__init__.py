"""Generation from a checked request: admission, sampling parameters, running generations."""
