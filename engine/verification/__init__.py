"""Verification that masked equals compacted, also inside the network, and predicted equals measured."""

from engine.verification.rescaled import Rescaled, Unrounded, rescaled_norms

__all__ = ["Rescaled", "Unrounded", "rescaled_norms"]
