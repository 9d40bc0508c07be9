"""Methods that may replace forward: they take the same arguments and call the same layers, but use other sizes.

An exporter may bind another method as the forward of a module, for example one that splits by a number where forward
takes equal parts. Such a method is recorded as well, so that the attributes that only it reads follow. A method that
calls other layers than forward computes something else, and is ignored.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from engine.alternatives.attributes import Attribute, Setting
from engine.numbers.integers import integers
from engine.program.expressions import AttributeOf, leaves
from engine.program.graph import Node, Value
from engine.program.stored import distinct_modules

__all__ = ["is_equivalent", "alternative_forwards"]


def alternative_forwards(model: nn.Module, nodes: Iterable[Node]) -> list[Setting]:
    """Return the settings in which methods replace forward, one for each name of a method.

    Args:
        model: the model whose classes are searched.
        nodes: the run on the example; attributes that it reads follow in any case.

    Example:
        >>> class Halves(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.width, self.body = 2, nn.Linear(3, 4)
        ...
        ...     def forward(self, x):
        ...         return self.body(x).chunk(2, 1)
        ...
        ...     def forward_split(self, x):
        ...         return self.body(x).split((self.width, self.width), 1)
        >>> [setting] = alternative_forwards(Halves(), [])
        >>> [(str(attribute), function.__name__) for attribute, function in setting]
        [('forward', 'forward_split')]
    """
    exprs = [expr for node in nodes for expr in node.sizes.values()]
    read = {(leaf.module, leaf.name) for e in exprs for leaf in leaves(e) if isinstance(leaf, AttributeOf)}
    settings: dict[str, list[tuple[Attribute, Any]]] = {}
    for owner, module in distinct_modules(model).items():
        if "forward" in vars(module):  # code has replaced it already
            continue
        kind: Any = type(module)
        candidates = _candidates(kind)
        if not candidates:
            continue
        numbers = {name.partition("[")[0] for name in integers(module) if (owner, name) not in read}
        for name, function in candidates.items():
            if not numbers.isdisjoint(function.__code__.co_names):
                bound = types.MethodType(function, module)
                settings.setdefault(name, []).append((Attribute(owner, module, "forward"), bound))
    return list(settings.values())


@functools.cache
def _candidates(kind: Any) -> Mapping[str, types.FunctionType]:
    """Return the methods of a class that take the same arguments as forward, and that forward does not call."""
    forward = kind.forward
    if not isinstance(forward, types.FunctionType) or str(forward.__module__).startswith("torch."):
        return {}
    names = {name for base in kind.__mro__ if not base.__module__.startswith("torch.") for name in vars(base)}
    methods = {name: inspect.getattr_static(kind, name) for name in names - {"forward"} if not name.startswith("__")}
    called = set(_methods_called(forward, methods))
    return {
        name: method
        for name, method in sorted(methods.items())
        if isinstance(method, types.FunctionType) and name not in called and _arguments(method) == _arguments(forward)
    }


def _methods_called(function: types.FunctionType, methods: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names that a function uses, directly or in methods that it calls."""
    waiting, seen = [function], set[str]()
    while waiting:
        names = set(waiting.pop().__code__.co_names) - seen
        seen |= names
        waiting += [methods[name] for name in names if isinstance(methods.get(name), types.FunctionType)]
    yield from seen


def _arguments(function: types.FunctionType) -> list[tuple[str, Any]]:
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def is_equivalent(
    nodes: Sequence[Node], other_nodes: Sequence[Node], outputs: Sequence[Value], other_outputs: Sequence[Value]
) -> bool:
    """Whether two runs read the same parameters by the same ops, on tensors of the same shapes.

    Args:
        nodes, other_nodes: ops of the runs.
        outputs, other_outputs: outputs of the runs.
    """
    same = [v.shape for v in outputs] == [v.shape for v in other_outputs]
    return same and _ops_with_parameters(nodes) == _ops_with_parameters(other_nodes)


def _ops_with_parameters(nodes: Iterable[Node]) -> list[tuple[Any, ...]]:
    return [
        (node.op, [(v.name, v.shape) for v in node.inputs], [v.shape for v in node.outputs])
        for node in nodes
        if any(v.stored for v in node.inputs)
    ]
