"""One module per group of paths; each has a `router`."""
