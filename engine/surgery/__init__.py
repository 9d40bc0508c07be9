"""Exchanging the class of a module: one file per kind of exchange, and what all of them share."""

from engine.surgery.classes import original

__all__ = ["original"]
