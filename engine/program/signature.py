"""Op schemas."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Signature", "signature", "without_out"]


_OTHERS = frozenset({"view.dtype"})
"""Overloads that compute something else than the others of their name: these read bits as other numbers."""

_SIZES = re.compile(r"SymInt(?:\[\d*\])?\??\s(\w+)")


@dataclass(frozen=True)
class Signature:
    """Facts about an op from its schema.

    Attributes:
        op: plain name of the op.
        names: names of its arguments.
        defaults: default values by argument name.
        writes: names of arguments that it writes to.
        sizes: names of the numbers that torch may trace symbolically: sizes and amounts, no dimensions.
        recorded: whether calls are part of the program; torch's internal queries are not.
        shares: whether it writes to an argument or returns a view of one.
    """

    op: str
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    writes: tuple[str, ...]
    sizes: frozenset[str]
    recorded: bool
    shares: bool

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments by name."""
        arguments = {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}
        return {name: arguments[name] for name in self.names if name in arguments}


@functools.cache
def signature(func: Any) -> Signature:
    """Read the schema of an overload."""
    schema = func._schema
    space, name = schema.name.split("::")
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    if writes and name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    if str(func).removeprefix(f"{space}.") in _OTHERS:
        name = str(func).removeprefix(f"{space}.")
    return Signature(
        op=name if space == "aten" else f"{space}::{name}",
        names=tuple(a.name for a in schema.arguments),
        defaults={a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        writes=writes,
        sizes=frozenset(_SIZES.findall(str(schema))),
        recorded=space != "prim",
        shares=any(value.alias_info is not None for value in (*schema.arguments, *schema.returns)),
    )


@functools.cache
def without_out(func: Any) -> Any:
    """Return the overload that returns what this one writes to its ``out`` arguments; None if there is none.

    Args:
        func: overload of an op.

    Example:
        >>> space = torch.ops.aten
        >>> without_out(space.add.out) is space.add.Tensor, without_out(space.add.Tensor)
        (True, None)
    """
    arguments = func._schema.arguments
    if not any(a.is_out for a in arguments):
        return None
    kept = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    overloads = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    return next((o for o in overloads if [(a.name, str(a.type)) for a in o._schema.arguments] == kept), None)
