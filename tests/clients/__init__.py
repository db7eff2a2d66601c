"""Real clients against a server on the loopback whose engine plays back what a test writes; run by `make test-clients`."""
