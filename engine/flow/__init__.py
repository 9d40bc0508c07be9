"""Which code of a model runs, and in which other calls: branches, conditions, loops, and the arguments of functions."""
