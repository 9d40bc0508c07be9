"""The values around a piece of code: those that its module reads, computes, and passes between its parts.

If code may use them in a way that no analysis follows, all of them count as used.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterator, Mapping
from types import CodeType

from torch import nn

from engine.flow.effects import names_read
from engine.flow.names_used import names_in
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow, is_inside
from engine.program.graph import Node, Value
from engine.source.bindings import expressions_behind
from engine.source.function_text import syntax_of
from engine.source.instructions import arguments_of
from engine.source.model_code import codes_of
from engine.source.syntax import nodes_of

__all__ = ["is_own_op", "may_pick_arguments", "use_values_around_code", "values_around"]


def use_values_around_code(
    code: CodeType,
    modules: Mapping[str, nn.Module],
    dataflow: Dataflow,
    assumptions: Assumptions,
    reason: str,
    called: Collection[CodeType] = (),
    received: bool = False,
) -> None:
    """Count as used the values around all modules for which a function may run.

    Args:
        code: of the function.
        modules: all modules by name.
        dataflow: of the recorded ops.
        assumptions: is extended.
        reason: a verb phrase about a value, for the user.
        called: code of the functions that ran; a plain function without ops runs for the modules of its callers.
        received: whether it may use what a module receives and no op of it reads: values around the module that calls.
    """
    owners = _owners(code, modules, dataflow, called)
    if received:
        owners |= {name.rpartition(".")[0] for name in owners} & modules.keys()
    for owner in owners:
        assumptions.use(values_around(owner, modules, dataflow), reason)


def may_pick_arguments(pick: ast.AST, code: CodeType, modules: Mapping[str, nn.Module]) -> bool:
    """Whether an expression may pick from what its function receives, and not from attributes of its module alone.

    Args:
        pick: a subscript, a method call, or a comparison in a loop.
        code: of the function.
        modules: all modules by name.
    """
    tree = syntax_of(code)
    if tree is None:
        return True
    owner = _self_of(code, modules)
    container = pick.func if isinstance(pick, ast.Call) else pick.value if isinstance(pick, ast.Subscript) else pick
    parts = list(expressions_behind(container, tree, owner))  # type: ignore[arg-type]
    names = {name for part in parts for name in names_read(part)} - {owner}
    for call in nodes_of(tree, ast.Call):  # functions may fill what they receive
        if any(isinstance(argument, ast.Name) and argument.id in names for argument in call.args):
            parts += expressions_behind(call, tree, owner)
    received = {*arguments_of(code), *code.co_freevars} - {owner}
    return any(name in received for part in parts for name in names_read(part))


def _self_of(code: CodeType, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the argument of a method that is its module."""
    kinds = {type(module) for module in modules.values()}
    is_method = any(
        code in codes_of(kind) and not isinstance(inspect.getattr_static(kind, code.co_name, None), staticmethod)  # type: ignore[arg-type]
        for kind in kinds
    )
    return code.co_varnames[0] if is_method and code.co_varnames else None


def _owners(
    code: CodeType, modules: Mapping[str, nn.Module], dataflow: Dataflow, called: Collection[CodeType]
) -> set[str]:
    """Return the modules for which a function may run; functions that mention its name may call it."""
    owners, waiting, seen = set[str](), [code], {code}
    while waiting:
        one = waiting.pop()
        own = {_owner(modules, n) for n in dataflow.nodes if n.site is not None and n.site.code is one}
        own |= {name for name, module in modules.items() if one in codes_of(type(module))}  # type: ignore[arg-type]
        callers = [c for c in called if not own and c not in seen and one.co_name in names_in(c)]
        owners |= own
        seen.update(callers)
        waiting += callers
    return owners


def is_own_op(modules: Mapping[str, nn.Module], node: Node) -> bool:
    """Whether an op was called by the code of a module itself, and not inside one of torch's layers.

    Args:
        modules: all modules by name.
        node: the op.
    """
    return not type(modules[node.module]).__module__.startswith("torch.nn")


def _owner(modules: Mapping[str, nn.Module], node: Node) -> str:
    """Return the module whose code calls an op, or the layer of torch that does."""
    if is_own_op(modules, node):
        return node.module
    if not node.callers:  # a direct call of its forward
        return node.module.rpartition(".")[0]
    return next((name for name in reversed(node.callers) if name != node.module), "")


def values_around(name: str, modules: Mapping[str, nn.Module], dataflow: Dataflow) -> Iterator[Value]:
    """Yield the values that a module reads, those that its own code computes, and those around its parts.

    Its own code handles the results of whatever it calls, such as parts in a container that it iterates over.

    Args:
        name: of the module.
        modules: all modules by name; one that others share has the first of its names.
        dataflow: of the recorded ops.
    """
    names = {id(module): key for key, module in modules.items()}
    parts = [names[id(child)] for child in modules[name].children() if id(child) in names]
    for part in (name, *parts):
        for values in dataflow.boundary(part):
            yield from values
    callees = {node.index: _callee(name, node) for node in dataflow.nodes_in(name)}
    read = {value.index for node in dataflow.nodes for value in node.inputs}
    for node in dataflow.nodes:
        callee = callees.get(node.index)
        if callee == name:
            yield from (value for value in (*node.inputs, *node.outputs) if not value.stored)
        elif callee is not None:
            sources = ((value, value.producer) for value in node.inputs if not value.stored)
            yield from (value for value, source in sources if source is None or callees.get(source) != callee)
            yield from (value for value in node.outputs if value.index not in read)


def _callee(name: str, node: Node) -> str:
    """Return the module that runs an op for a module's own code: the module itself, or one that it calls."""
    running = (*node.callers, node.module)
    if name in running:
        place = len(running) - running[::-1].index(name)
        return running[place] if place < len(running) else name
    return next((inner for inner in running if is_inside(inner, name)), name)
