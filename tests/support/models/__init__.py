"""Small models and checkpoints with random weights, made from seeds."""
