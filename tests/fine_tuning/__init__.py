"""The demonstration model learns a new skill through the API: `make prove-fine-tuning`."""
