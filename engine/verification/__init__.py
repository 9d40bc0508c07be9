"""Masked equals compacted, inside too; counted equals measured."""

from engine.verification.rescaled import Rescaled, rescaled_norms

__all__ = ["Rescaled", "rescaled_norms"]
