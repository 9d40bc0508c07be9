"""What the engine knows of ops: one file per family, every op named in exactly one place."""

from engine.ops import (
    attention,
    cells,
    contraction,
    dimensions,
    indexing,
    join,
    norm,
    opaque,
    order,
    packed,
    pointwise,
    recurrent,
    sampling,
    shape,
    shuffle,
    slicing,
    span,
    spatial,
    write,
)
from engine.rule import Registry

__all__ = ["HEAD_DIMENSIONS", "RULES"]

_FAMILIES = (
    attention,
    cells,
    contraction,
    indexing,
    join,
    norm,
    opaque,
    order,
    packed,
    pointwise,
    recurrent,
    sampling,
    shape,
    shuffle,
    slicing,
    span,
    spatial,
    write,
)

RULES = Registry(rule for family in _FAMILIES for rule in family.RULES)

HEAD_DIMENSIONS = Registry(
    rule for family in _FAMILIES for rule in (dimensions if family is attention else family).RULES
)
