"""Inputs that several tests go through."""
