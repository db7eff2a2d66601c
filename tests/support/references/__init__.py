"""Results by NumPy in float64, and gradients, that others are compared with."""
