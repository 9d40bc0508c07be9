"""Whether a rule says the truth, by brute force."""
