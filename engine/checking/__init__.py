"""Brute-force checks of op rules."""
