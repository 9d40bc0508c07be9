"""Which ops run in functions that the caller chooses, by a name or by passing them: these may do anything."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import nn

from engine.program.graph import Node
from engine.program.places import shown_place
from engine.recording.missed import code_of
from engine.source.picking import Picks
from engine.source.stepping import Course

__all__ = ["through_chosen"]


def through_chosen(
    nodes: Iterable[Node],
    courses: Collection[Course],
    modules: Sequence[nn.Module],
    options: Mapping[CodeType | None, Collection[str]],
    settled: Callable[[nn.Module, str], bool],
) -> Iterator[tuple[Node, str]]:
    """Yield the ops that run in such functions, with the reason; all of the code that calls one which runs none.

    Args:
        nodes: what was recorded.
        courses: what ran.
        modules: one of each class.
        options: arguments by code that may be functions of the caller's.
        settled: tells of a module and a path of attributes whether nobody sets the last one of them.
    """
    calls: dict[CodeType, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.site is not None:
            calls[node.site.code].append(node)
    for code, own in calls.items():
        picks = _picks(code, modules, options.get(code, ()), settled)
        for call in picks:
            ran = [c.function.ran(call, c.ran) for c in courses if c.function.code is code]
            if ran and not any(ran):
                continue
            inside = [node for node in own if picks.at(node.site.end, node.site.line) is call]
            place = shown_place(f"{code.co_filename}:{call.lineno}")
            yield from ((node, f"goes through a function that the caller chooses at {place}") for node in inside or own)


def _picks(
    code: CodeType,
    modules: Sequence[nn.Module],
    options: Collection[str],
    settled: Callable[[nn.Module, str], bool],
) -> Picks:
    owners = [module for module in modules if code in _codes(type(module))]  # type: ignore[arg-type]

    def is_settled(path: str) -> bool:
        return bool(owners) and all(settled(owner, path) for owner in owners)

    def is_module(path: str) -> bool:
        return all(isinstance(_at(owner, path), nn.Module) for owner in owners)

    return Picks(code, options, is_settled, code.co_varnames[0] if owners else None, is_module)


@functools.cache
def _codes(kind: Any) -> frozenset[CodeType | None]:
    """Return the code of the methods of a class that is not torch's."""
    own = (base for base in kind.__mro__ if not base.__module__.startswith("torch."))
    return frozenset(code_of(held) for base in own for held in vars(base).values() if callable(held))


def _at(owner: Any, path: str) -> Any:
    """Return what is at a path of attributes."""
    return functools.reduce(lambda held, name: getattr(held, name, None), path.split("."), owner)
