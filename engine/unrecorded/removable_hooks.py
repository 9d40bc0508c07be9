"""Hooks on modules that code of the model may remove: later calls run without what they do."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.surroundings import values_around
from engine.source.model_code import user_classes
from engine.source.setup_code import syntax_of_python_module

__all__ = ["use_values_around_removable_hooks"]

_TABLES = frozenset(["_forward_hooks", "_forward_pre_hooks"])
_ENGINE = __name__.partition(".")[0]


def use_values_around_removable_hooks(
    modules: Mapping[str, nn.Module], dataflow: Dataflow, assumptions: Assumptions
) -> None:
    """Count as used the values around modules with hooks, and around their callers, if code may remove the hooks.

    A hook may replace what a module receives and returns, so that without it other values meet.

    Args:
        modules: all modules by name.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    hooked = [name for name, module in modules.items() if any(map(_is_of_user, _hooks_on(module)))]
    if not hooked or not _removes_hooks(modules[""]):
        return
    for name in hooked:
        owners = {name, name.rpartition(".")[0]}
        for node in dataflow.nodes_in(name):
            running = ("", *node.callers, node.module)
            owners |= {outer for outer, inner in zip(running, running[1:], strict=False) if inner == name}
        for owner in owners & modules.keys():
            values = list(values_around(owner, modules, dataflow))
            assumptions.use(values, f"could be used in another way without the hook on {name or 'the model'}")
            assumptions.vary(values)
    listed = ", ".join(name or "the model" for name in hooked)
    assumptions.notes.append(
        f"Modules with hooks that code of the model may remove; around them all channels stay: {listed}."
    )


def _hooks_on(module: nn.Module) -> Iterable[Any]:
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def _is_of_user(hook: Any) -> bool:
    """Whether a hook belongs neither to torch, as those of `torch.nn.utils.prune` do, nor to the engine."""
    own = str(getattr(hook, "__module__", ""))
    return own.partition(".")[0] not in ("torch", _ENGINE)


def _removes_hooks(model: nn.Module) -> bool:
    """Whether code of a model mentions a method ``remove`` without arguments, or the tables of hooks."""
    names = {cls.__module__ for cls in user_classes(model)}
    return any(map(_mentions_removal, map(syntax_of_python_module, names)))


def _mentions_removal(tree: ast.Module | None) -> bool:
    return tree is None or any(node.attr == "remove" or node.attr in _TABLES for node in _attributes(tree))


def _attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes in a syntax tree, except methods that are called with arguments: ``names.remove(name)``."""
    nodes = list(ast.walk(tree))
    called = {node.func for node in nodes if isinstance(node, ast.Call) and (node.args or node.keywords)}
    return (node for node in nodes if isinstance(node, ast.Attribute) and node not in called)
