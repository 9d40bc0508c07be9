"""Op rules, one file per family: every op is named in exactly one place, and a file with ``RULES`` is a family."""

from __future__ import annotations

import importlib
import pkgutil

from torch import nn

from engine.bounds import check_kinds
from engine.errors import InputError
from engine.ops import attention, dimensions, reductions, spatial
from engine.program.graph import Graph
from engine.rule import Registry

__all__ = ["HEAD_DIMENSIONS", "RULES", "rules_of", "set_attention"]

_FILES = [importlib.import_module(file.name) for file in pkgutil.iter_modules(__path__, f"{__name__}.")]
_FAMILIES = [file for file in _FILES if hasattr(file, "RULES") and file is not dimensions]

RULES = Registry(rule for family in _FAMILIES for rule in family.RULES)

_BY_ENTRY = [dimensions, *(family for family in _FAMILIES if family not in (attention, reductions, spatial))]

HEAD_DIMENSIONS = Registry(rule for family in _BY_ENTRY for rule in family.RULES)

_ATTENTION = {"heads": RULES, "dimensions": HEAD_DIMENSIONS}


def set_attention(model: nn.Module, units: str) -> None:
    """Choose whether a model's attention loses heads or head dimensions when no ``rules`` are passed, as in callbacks.

    Args:
        model: gets the attribute ``attention_units``, which copies inherit.
        units: ``"heads"`` (the default) or ``"dimensions"``, the same in all heads.

    Raises:
        InputError: for any other value.

    Example:
        >>> net = nn.MultiheadAttention(8, 2)
        >>> set_attention(net, "dimensions")
        >>> net.attention_units
        'dimensions'
    """
    check_kinds(set_attention, locals())
    if units not in _ATTENTION:
        raise InputError(f"Attention loses {' or '.join(map(repr, _ATTENTION))}; got {units!r}.")
    model.attention_units = units  # type: ignore[assignment]


def rules_of(graph: Graph) -> Registry:
    """Return the default rules of a graph."""
    return _ATTENTION[graph.attention]
