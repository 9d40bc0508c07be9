"""Numbers, flags and text among the arguments of forward: recorded once more with others in their place.

A scale, a number of steps, the place of a layer or the name of a task is another one in other calls, whether the
example gives it or leaves it to its default. What an op is given at another number than in the example varies, and what
runs, or leaves the run, at another one becomes part of the program.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from engine.program.graph import Node, Value
from engine.recording.attributes import choices, other_reals, switches_of
from engine.recording.missed import code_of, methods_of
from engine.source.passing import passed_arguments
from engine.source.picking import space_of

__all__ = ["Arguments", "steps_of"]

_MOST = 48
"""Calls that are recorded at most."""

_STEPS = 16
_NESTED = 3
_LONGEST = 40

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class _Leaf(NamedTuple):
    """A plain value among the arguments.

    Attributes:
        path: the name of the argument, and the keys in containers.
        value: what it is in the example.
    """

    path: tuple[Any, ...]
    value: Any


class Arguments:
    """The plain values among the arguments of one call, and what else they may be.

    Args:
        model: what is called.
        args, kwargs: of the example.
        declared: tells of the name of an argument whether the user says that it keeps its value.

    Example:
        >>> class Net(nn.Module):
        ...     def forward(self, x, flip=False, *, scale=1.0):
        ...         return x
        >>> [[kwargs for _, kwargs in way] for _, way in Arguments(Net(), (0,), {}).ways()][-2:]
        [[{'scale': 0.75}], [{'scale': 0.0}]]
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        declared: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._declared = declared
        self._model, self._signature, self._passed = model, *_bound(model, args, kwargs)
        own = self._signature.parameters
        self._values = {name: self._passed.get(name, own[name].default) for name in own}

    def ways(self) -> Iterator[tuple[str, Iterator[Call]]]:
        """Yield the name of an argument, with calls in which it is another."""
        for name, value in self._values.items():
            for leaf in () if self._declared(name) else _leaves((name,), value):
                yield from ((name, map(self._call(leaf), way)) for way in self._others(name, leaf.value))
        yield from self._together()

    def _together(self) -> Iterator[tuple[str, Iterator[Call]]]:
        """Yield calls in which all flags are on, or off, where there are several and the example has it otherwise."""
        leaves = [
            leaf for name, value in self._values.items() if not self._declared(name) for leaf in _leaves((name,), value)
        ]
        flags = [leaf for leaf in leaves if type(leaf.value) is bool]
        for value in (True, False):
            if sum(leaf.value is not value for leaf in flags) > 1:
                arguments = dict(self._values)
                for leaf in flags:
                    arguments[leaf.path[0]] = _replaced(arguments[leaf.path[0]], leaf.path[1:], value)
                changed = {leaf.path[0] for leaf in flags} | self._passed.keys()
                yield flags[0].path[0], iter([self._bound({name: arguments[name] for name in changed})])

    def _bound(self, arguments: Mapping[str, Any]) -> Call:
        bound = inspect.BoundArguments(self._signature, OrderedDict(arguments))
        return bound.args, bound.kwargs

    def _call(self, leaf: _Leaf) -> Callable[[Any], Call]:
        name, *keys = leaf.path

        def call(value: Any) -> Call:
            return self._bound({**self._passed, name: _replaced(self._values[name], keys, value)})

        return call

    def _others(self, name: str, value: Any) -> Iterator[list[Any]]:
        """Yield what a value may be instead: numbers in a row in either direction, everything else on its own."""
        if isinstance(value, bool):
            yield [not value]
        elif isinstance(value, float):
            yield from ([other] for other in other_reals(value) if other != value)
        elif isinstance(value, int):
            yield [value + step for step in range(1, _STEPS + 1)]
            yield [value - step for step in range(1, _STEPS + 1) if value < 0 or step <= value]
        else:
            others = dict.fromkeys(self._texts(name, value))
            yield from ([other] for other in others if other != value)

    def _texts(self, name: str, value: Any) -> Iterator[Any]:
        """Yield what a text, or a member of an enumeration, may be in the code that an argument is passed on to."""
        codes = passed_arguments(self._model, {name})
        modules = {type(m): m for m in self._model.modules() if code_of(type(m).forward) in codes}
        spaces = [space_of(file) for file in sorted({code.co_filename for code in codes})]
        for module in (self._model, *modules.values()):
            yield from choices(value, module, *spaces)
        yield from _texts(value, self._model, *codes)

    def record(self, run: Callable[[Call], bool | None]) -> list[str]:
        """Record the other calls; numbers in a row as long as there is something new in them.

        Args:
            run: records a call; whether anything was new in it, None where the model rejects it.

        Returns:
            The arguments of which no other value was recorded.
        """
        recorded: dict[str, bool] = {}
        left = _MOST
        for name, way in self.ways():
            recorded.setdefault(name, False)
            for call in way:
                left -= 1
                new = run(call) if left >= 0 else None
                recorded[name] |= new is not None
                if not new:
                    break
        return [name for name, ran in recorded.items() if not ran]


def _bound(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return the signature of forward, and the arguments by name; nothing where it has none, or rejects them."""
    try:
        signature = inspect.signature(model.forward)
        return signature, signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return inspect.Signature(), {}


def _leaves(path: tuple[Any, ...], value: Any) -> Iterator[_Leaf]:
    """Yield the numbers, flags and texts in an argument, and in containers in it."""
    if isinstance(value, (bool, int, float, str, Enum)):
        yield _Leaf(path, value)
    elif len(path) <= _NESTED and type(value) in (tuple, list, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves((*path, key), item)


def _replaced(whole: Any, keys: Sequence[Any], value: Any) -> Any:
    """Return a container with another value at a place."""
    if not keys:
        return value
    key, *rest = keys
    items = whole.items() if isinstance(whole, dict) else enumerate(whole)
    changed = {k: _replaced(item, rest, value) if k == key else item for k, item in items}
    return changed if isinstance(whole, dict) else type(whole)(changed.values())


def _texts(value: Any, model: nn.Module, *codes: CodeType) -> Iterator[str]:
    """Yield the texts in forward, in methods that it calls and in other code, and another."""
    if not isinstance(value, str):
        return
    code = code_of(type(model).forward)
    for method in (*(() if code is None else (code, *_methods(model, code))), *codes):
        yield from (text for text in _constants(method) if len(text) <= _LONGEST and not any(map(str.isspace, text)))
    yield "another"


def _methods(model: nn.Module, code: CodeType) -> Iterator[CodeType]:
    own = {name for name, _ in methods_of(type(model))}  # type: ignore[arg-type]
    codes = (code_of(getattr(type(model), name)) for name in sorted(own.intersection(code.co_names)))
    return (method for method in codes if method is not None)


def _constants(code: CodeType) -> Iterator[str]:
    """Yield the texts in a function."""
    waiting = list(code.co_consts)
    for constant in waiting:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            waiting += constant
        elif isinstance(constant, CodeType):
            waiting += constant.co_consts


def steps_of(nodes: Sequence[Node], outputs: Sequence[Value]) -> set[tuple[Any, ...]]:
    """Return what runs, with which flags and along which dimensions, and which calls make what leaves the run.

    Args:
        nodes, outputs: of the run.
    """
    calls = {n.index: (n.module, n.op, None if n.site is None else (n.site.code, n.site.line)) for n in nodes}
    makers = {value.index: (*calls[n.index], at) for n in nodes for at, value in enumerate(n.outputs)}
    return {(*calls[n.index], switches_of(n)) for n in nodes} | {makers[v.index] for v in outputs if v.index in makers}
