"""Attributes that hold an outdated size after a compaction and are read by methods other than forward.

The only evidence that such an attribute is a size is that the numbers are equal, so it is reported but not changed.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from engine.compaction.slices import Slice
from engine.program.graph import Graph

__all__ = ["stale"]


def stale(graph: Graph, slices: Mapping[str, Slice], attributes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a note for each attribute that was a size and is read by a method that did not run.

    Args:
        graph: the graph.
        slices: slices of parameters and buffers.
        attributes: attributes that the plan updates, by module.
    """
    sites = [node.site for node in graph.nodes if node.site is not None]
    ran = {code for site in sites for code in (site.code, site.caller)}
    notes: dict[str, None] = {}
    for module, numbers in graph.attributes.items():
        kind = graph.types[module]
        plain = {
            key: n for key, n in numbers.items() if key[0] != "_" and n > 1 and key not in attributes.get(module, ())
        }
        if plain and not kind.__module__.startswith("torch."):
            notes.update(dict.fromkeys(_of_module(module, kind, plain, slices, ran)))
    return list(notes)


def _of_module(
    module: str, kind: type, numbers: Mapping[str, int], slices: Mapping[str, Slice], ran: Collection[Any]
) -> Iterator[str]:
    """Yield a note for each attribute of a module that equals the old size of a parameter in it."""
    idle = _idle(kind, ran)
    if not idle:
        return
    prefix = f"{module}." if module else ""
    inside = {name.removeprefix(prefix): cut for name, cut in slices.items() if name.startswith(prefix)}
    parts = {name.partition(".")[0] for name in inside}
    readers = [(method, names) for method, names in idle if names & parts]
    for key, number in numbers.items() if readers else ():
        sizes = {size for cut in inside.values() for size in _narrowed(cut, number)}
        for method, names in readers if sizes else ():
            if key.partition("[")[0] in names:
                now = " or ".join(map(str, sorted(sizes)))
                yield (
                    f"`{kind.__name__}.{method}`, which did not run, reads `{key}`, which is still {number}, while a "
                    f"layer of the module now has {now} channels; set it before you call the method."
                )


def _narrowed(cut: Slice, number: int) -> Iterator[int]:
    """Yield the new sizes of dimensions of a given size."""
    yield from (new for old, new in zip(cut.before, cut.shape, strict=True) if old == number != new)


def _idle(kind: type, ran: Collection[Any]) -> list[tuple[str, frozenset[str]]]:
    """Return the methods that did not run and take arguments, with all the names that they read."""
    return [(name, names) for name, code, names in _methods(kind) if code not in ran]


def _methods(kind: type) -> Iterator[tuple[str, types.CodeType, frozenset[str]]]:
    """Yield the methods that take arguments, with all the names that they read."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, member in vars(base).items():
            function: Any = member
            if isinstance(function, types.FunctionType) and name != "forward" and name[:2] != "__":
                if function.__code__.co_argcount > 1:
                    yield name, function.__code__, frozenset(function.__code__.co_names)
