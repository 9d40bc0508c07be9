"""What the engine knows of ops: one file per family, every op named in exactly one place."""

from engine.ops import contraction, join, norm, pointwise, shape, shuffle, slicing, spatial, write
from engine.rule import Registry

__all__ = ["RULES"]

RULES = Registry(
    rule
    for family in (contraction, join, norm, pointwise, shape, shuffle, slicing, spatial, write)
    for rule in family.RULES
)
