"""Ops inside functions that the caller chooses, by name or as an argument: another function may do anything."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from engine.flow.coverage import FunctionCoverage
from engine.flow.dynamic_calls import DynamicCalls
from engine.flow.mutability import Mutability
from engine.observations.assumptions import Assumptions
from engine.program.graph import Node
from engine.program.places import shown_place

__all__ = ["assume_nothing_of_dynamic_calls"]


def assume_nothing_of_dynamic_calls(
    nodes: Iterable[Node],
    coverages: Collection[FunctionCoverage],
    options: Callable[[CodeType], Collection[str]],
    mutability: Mutability,
    assumptions: Assumptions,
) -> None:
    """Count the inputs and outputs of ops in dynamic calls as used, and their outputs as varying.

    Args:
        nodes: the recorded ops.
        coverages: the functions that ran.
        options: returns, for the code of a function, its arguments that may be functions chosen by the caller.
        mutability: of the model's attributes.
        assumptions: is extended.
    """
    for node, place in _nodes_in_dynamic_calls(nodes, coverages, options, mutability):
        values = [v for v in (*node.inputs, *node.outputs) if not v.stored]
        assumptions.use(values, f"passes through a function that the caller chooses at {place}")
        assumptions.vary(node.outputs)


def _nodes_in_dynamic_calls(
    nodes: Iterable[Node],
    coverages: Collection[FunctionCoverage],
    options: Callable[[CodeType], Collection[str]],
    mutability: Mutability,
) -> Iterator[tuple[Node, str]]:
    """Yield the ops of dynamic calls with the places of the calls; for a call without ops, all ops of the function."""
    nodes_by_code: dict[CodeType, list[Node]] = defaultdict(list)
    for node in nodes:
        if node.site is not None:
            nodes_by_code[node.site.code].append(node)
    for code, own in nodes_by_code.items():
        calls = _dynamic_calls(code, mutability, options(code))
        for call in calls:
            ran = [c.function.ran(call, c.ran) for c in coverages if c.function.code is code]
            if ran and not any(ran):
                continue
            inside = [node for node in own if calls.at(node.site.span, node.site.line) is call]
            place = shown_place(f"{code.co_filename}:{call.lineno}")
            yield from ((node, place) for node in inside or own)


def _dynamic_calls(code: CodeType, mutability: Mutability, options: Collection[str]) -> DynamicCalls:
    owners = mutability.owners_of(code)

    def never_changed(path: str) -> bool:
        return bool(owners) and all(mutability.never_changed(owner, path) for owner in owners)

    def is_module(path: str) -> bool:
        return all(isinstance(_attribute_at(owner, path), nn.Module) for owner in owners)

    return DynamicCalls(code, options, never_changed, code.co_varnames[0] if owners else None, is_module)


def _attribute_at(owner: Any, path: str) -> Any:
    return functools.reduce(lambda value, name: getattr(value, name, None), path.split("."), owner)
