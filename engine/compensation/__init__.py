"""Least squares into the readers of masked channels."""
