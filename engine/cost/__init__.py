"""What a model costs, what it will cost, and which widths are fast."""
