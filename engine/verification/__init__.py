"""Masked equals compacted, inside too; counted equals measured."""

from engine.verification.rescaled import Rescaled, Unrounded, rescaled_norms

__all__ = ["Rescaled", "Unrounded", "rescaled_norms"]
