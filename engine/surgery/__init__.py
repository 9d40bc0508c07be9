"""Exchanging the class of a module: one file per kind of exchange, and what all of them share."""

from engine.surgery.classes import original
from engine.surgery.spans import is_span, weights_of

__all__ = ["is_span", "original", "weights_of"]
