"""Compacted checkpoints: written, read, and made of other checkpoints without a fit."""
