"""What Lightning runs: the model and its example input, steps, strategies, ranks, loaders and restored weights."""
