"""Compacted weights on disk."""
