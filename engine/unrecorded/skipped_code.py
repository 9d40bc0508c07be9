"""Effects of skipping code that always ran: its variables keep their previous values."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import CodeType
from typing import Protocol

from engine.flow.branches import Branch
from engine.flow.effects import Effect, Functions, effect_on
from engine.observations.dataflow import Dataflow
from engine.program.graph import Node, Value
from engine.source.bindings import bindings, bound_value
from engine.source.syntax import nodes_of

__all__ = ["are_aligned", "before_and_after", "effects_of_skipping", "is_in_loop", "values_alike"]


class _Untaken(Protocol):
    """The part of `UntakenBranch` used here; it imports this file."""

    @property
    def branch(self) -> Branch: ...

    @property
    def code(self) -> CodeType: ...

    @property
    def owner(self) -> str: ...


_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def effects_of_skipping(
    branch: Branch, tree: ast.FunctionDef | ast.AsyncFunctionDef, functions: Functions
) -> Mapping[str, Effect]:
    """Return the effect on each variable of skipping the code that a branch skips.

    A variable that the code computes elementwise from itself changes accordingly; for any other variable, its previous
    value replaces the one that the code assigns.

    Args:
        branch: the side of a condition that has no code, or that skips the rest of a loop.
        tree: syntax of the function.
        functions: known effects of functions on the entries of tensors.
    """
    effects: dict[str, Effect] = {}
    read = _read_behind(branch, tree)
    for name, skipped in branch.skipped_bindings.items():
        if read is not None and name not in read:
            continue
        if "." not in name and (is_in_loop(branch.skipped, tree) or _is_set_elsewhere(name, branch, tree)):
            own = [effect_on(bound_value(name, binding), name, functions) for binding in skipped]
            each = [Effect.USES if effect is None else effect for effect in own]
            effects[name] = functools.reduce(Effect.and_then, each) if each else Effect.USES
    return effects


def _read_behind(branch: Branch, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str] | None:
    """Return the variables that are read after the loop that a branch leaves; None if it leaves none."""
    loops = [loop for loop in nodes_of(tree, *_LOOPS) if any(node is branch.nodes[-1] for node in ast.walk(loop))]
    if len(loops) != 1 or not isinstance(branch.nodes[-1], ast.Break):
        return None
    end: int = loops[0].end_lineno  # type: ignore[attr-defined]
    return {n.id for n in nodes_of(tree, ast.Name) if isinstance(n.ctx, ast.Load) and n.lineno > end}


def are_aligned(values: Sequence[Value], dataflow: Dataflow) -> bool:
    """Whether values computed from one another have the same channels, as along a residual stream.

    Args:
        values: values that a variable held; pairs that are not computed from one another are ignored.
        dataflow: of the recorded ops.
    """
    ordered = sorted(values, key=lambda value: value.index)
    return all(
        dataflow.follows(value, ordered[:place], aligned=True)
        or not dataflow.follows(value, ordered[:place], aligned=False)
        for place, value in enumerate(ordered)
    )


def before_and_after(
    branch: Branch, code: CodeType, values: Sequence[Value], dataflow: Dataflow
) -> Sequence[Value] | None:
    """Return the values of a variable before and after skipped code that computes it from itself.

    Args:
        branch: the side of a condition that skips the code.
        code: of the function.
        values: values that the variable held.
        dataflow: of the recorded ops.

    Returns:
        Values with the same channels; None if their channels differ, or the code computed none of them.
    """
    lines = _lines(branch)
    after = [value for value in values if _is_computed_on(lines, code, value, dataflow)]
    before = [v for v in values if v not in after and any(dataflow.follows(a, [v], aligned=True) for a in after)]
    if not after or not all(dataflow.follows(value, before, aligned=True) for value in after):
        return None
    return [*before, *after]


def values_alike(
    branch: _Untaken, values: Sequence[Value], effect: Effect, dataflow: Dataflow
) -> Sequence[Sequence[Value]]:
    """Return groups of a variable's values of which each may take the place of the others if code is skipped.

    Args:
        branch: the side of a condition that skips the code.
        values: values that the variable held.
        effect: of skipping the code.
        dataflow: of the recorded ops.

    Returns:
        All values, if they have the same channels as along a residual stream; otherwise each result of the code with
        the value that it pads, cuts or resizes channel by channel; none if the code computes anything else.
    """
    if effect is Effect.USES and are_aligned(values, dataflow):
        return [values]
    lines = _lines(branch.branch)
    nodes = [node for node in dataflow.nodes_in(branch.owner) if _is_on(lines, branch.code, node)]
    producers = {value.index: node for node in nodes for value in node.outputs}
    inner = {value.index for node in nodes for value in node.inputs}
    sources, pairs = {value.index for value in values} - producers.keys(), []
    for result in (value for node in nodes for value in node.outputs if value.index not in inner):
        source = result
        while source.index in producers:
            node = producers[source.index]
            if len(node.outputs) != 1 or len(node.inputs) != 1:
                return []
            if node.op.rstrip("_") not in dataflow.functions.moving | dataflow.functions.aligned:
                return []
            source = node.inputs[0]
        if source.index not in sources or source.ndim != result.ndim or source.shape[:2] != result.shape[:2]:
            return []
        pairs.append((source, result))
    return pairs


def _lines(branch: Branch) -> Collection[int]:
    return {line for s in branch.skipped for line in range(s.lineno, (s.end_lineno or s.lineno) + 1)}


def _is_on(lines: Collection[int], code: CodeType, node: Node) -> bool:
    return node.site is not None and node.site.code is code and node.site.line in lines


def _is_computed_on(lines: Collection[int], code: CodeType, value: Value, dataflow: Dataflow) -> bool:
    return value.producer is not None and _is_on(lines, code, dataflow.nodes[value.producer])


def is_in_loop(nodes: Iterable[ast.AST], tree: ast.AST) -> bool:
    """Whether syntax of a function is inside a loop, so that an earlier round may have set its variables.

    Args:
        nodes: the syntax.
        tree: of the function.

    Example:
        >>> tree = ast.parse("for n in x:\\n    y = n\\nz = y")
        >>> is_in_loop(tree.body[0].body, tree), is_in_loop(tree.body[1:], tree)
        (True, False)
    """
    return not _inside_of_loops(tree).isdisjoint(nodes)


@functools.cache
def _inside_of_loops(tree: ast.AST) -> frozenset[ast.AST]:
    return frozenset(
        node for loop in nodes_of(tree, *_LOOPS) for statement in loop.body for node in nodes_of(statement)
    )


def _is_set_elsewhere(name: str, branch: Branch, tree: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    own = {binding.node for binding in branch.skipped_bindings[name]}
    arguments = {a.arg for a in nodes_of(tree.args, ast.arg)}
    return name in arguments or any(binding.node not in own for binding in bindings(tree).get(name, ()))
