"""`make prove-gpu`: every figure that the project promises of a GPU, measured in one go."""
