"""Interface to Lightning: the model and its example input, steps, strategies, ranks, loaders and restored weights."""
