"""What the engine knows of ops: one file per family, every op named in exactly one place."""

from engine.ops import (
    attention,
    contraction,
    indexing,
    join,
    norm,
    opaque,
    order,
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

__all__ = ["RULES"]

RULES = Registry(
    rule
    for family in (
        attention,
        contraction,
        indexing,
        join,
        norm,
        opaque,
        order,
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
    for rule in family.RULES
)
