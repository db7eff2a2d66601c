"""Real clients against a server on the loopback whose model plays back what a test writes: `make test-clients`."""
