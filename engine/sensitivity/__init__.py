"""Sensitivity analysis: which layers tolerate pruning."""
