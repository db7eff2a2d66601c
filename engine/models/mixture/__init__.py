"""The half of a layer that is a mixture of experts. Public: `mixture.Mixture`, and `buffers`, what it computes in."""
