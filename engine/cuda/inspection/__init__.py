"""The CUDA devices and their utilisation, for the command line and for metrics."""
