"""Which layers can take pruning."""
