"""Servers under test, requests to them and what they serve."""
