"""Processes, threads, descriptors and disks."""
