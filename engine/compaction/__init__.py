"""Compaction plans, and their all-or-nothing application to a model."""
