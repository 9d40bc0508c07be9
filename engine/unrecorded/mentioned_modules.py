"""Modules that no recording ran, but that code that ran looked up: in a table, in a list, or by a number.

``self.table.get(x.shape[2], self.stem)(x)`` has run completely, whichever module it picked. Another module would read
what this one reads, and compute a replacement for its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import CodeType
from typing import Any

from torch import nn

from engine.flow.coverage import CoverageTracer
from engine.limits import DEEPEST_TABLE, MOST_TABLE_ITEMS
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.surroundings import values_around
from engine.source.mentions import Mention, mentions
from engine.source.model_code import codes_of
from engine.unrecorded.idle_modules import IdleModules

__all__ = ["modules_in", "use_values_near_idle_modules"]

_LISTS = (nn.ModuleList, nn.ModuleDict)


def modules_in(held: Any, depth: int = DEEPEST_TABLE) -> Iterator[nn.Module]:
    """Yield the modules in a container, and in containers in it; of a list of modules, its items.

    Args:
        held: value of an attribute.
        depth: number of levels of containers to search.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> list(modules_in({"a": [(8, layer)]})) == [layer], list(modules_in(layer))
        (True, [])
    """
    items: Iterable[Any] = ()
    if isinstance(held, _LISTS):
        items = held._modules.values()
    elif isinstance(held, Mapping):
        items = held.values()
    elif isinstance(held, (list, tuple, set, frozenset)):
        items = held
    for item in islice(items, MOST_TABLE_ITEMS) if depth else ():
        if isinstance(item, nn.Module) and not isinstance(item, _LISTS):
            yield item
        else:
            yield from modules_in(item, depth - 1)


def use_values_near_idle_modules(
    coverage: CoverageTracer,
    modules: Mapping[str, nn.Module],
    idle: IdleModules,
    dataflow: Dataflow,
    assumptions: Assumptions,
) -> None:
    """Count as used what a method computes, and what its parts read, if it looked up a module that did not run.

    Args:
        coverage: of the functions that ran.
        modules: all modules by name.
        idle: those that did not run.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    names = {id(module): name for name, module in modules.items()}
    methods: dict[Any, list[CodeType]] = {}
    for name, owner in modules.items() if idle.owners else ():
        kind: Any = type(owner)
        if kind not in methods:
            methods[kind] = [code for code in coverage.called if code in codes_of(kind)]
        for code in methods[kind]:
            ran = (
                mention
                for mention in mentions(code)
                if not mention.is_tested and coverage.evaluated(code, mention.node)
            )
            parts = (names.get(id(part)) for mention in ran for part in _held_at(owner, mention))
            for part in parts:
                if part is not None and idle.includes_any([part]) and not _runs(part, modules, dataflow):
                    reason = f"could be read or replaced by {part!r}, which did not run"
                    assumptions.use(values_around(name, modules, dataflow), reason)
                    break


def _runs(part: str, modules: Mapping[str, nn.Module], dataflow: Dataflow) -> bool:
    """Whether a module ran, or is in a list of which others ran, whose reads and results then count as used."""
    container = part.rpartition(".")[0]
    return bool(dataflow.nodes_in(container if isinstance(modules.get(container), _LISTS) else part))


def _held_at(owner: nn.Module, mention: Mention) -> Iterator[nn.Module]:
    """Yield the modules that code looks up without calling them."""
    held: Any = owner
    for position, step in enumerate(mention.path):
        inner = _part(held, step)
        if inner is None:
            is_method = mention.is_called and isinstance(held, nn.Module) and position + 1 == len(mention.path)
            if not is_method and _is_layer(held):  # its weight, or its number of channels
                return
            break
        held = inner
    else:
        if mention.is_called and isinstance(held, nn.Module):
            return
    if mention.of_children:
        named = held._modules.items() if isinstance(held, nn.Module) else ()
        yield from (module for name, module in named if module is not None and name.startswith(mention.prefix))
        yield from modules_in(held) if not isinstance(held, nn.Module) else ()
    elif held is not owner:
        yield from [held] if _is_layer(held) else modules_in(held)


def _is_layer(held: Any) -> bool:
    return isinstance(held, nn.Module) and not isinstance(held, _LISTS)


def _part(held: Any, step: Any) -> Any:
    """Return an attribute or an item of an object without running its code; None if it has none."""
    if isinstance(held, nn.Module):
        if isinstance(step, int):
            parts = list(held._modules.values())
            return parts[step] if -len(parts) <= step < len(parts) else None
        return held._modules.get(str(step), vars(held).get(str(step)))
    if isinstance(held, (list, tuple)):
        return held[step] if isinstance(step, int) and -len(held) <= step < len(held) else None
    return held.get(step) if type(held) is dict else None
