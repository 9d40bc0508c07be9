"""Numbers, flags and strings among the arguments of forward, recorded with other values as well.

A scale, a number of steps, the index of a layer or the name of a task differs between calls, whether the example passes
it or uses its default. Arguments of ops that differ between values vary, and ops that run, or outputs that exist, only
with another value become part of the program.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.alternatives.argument_lengths import containers_of_tensors, longer, shorter
from engine.alternatives.attributes import choices, other_reals, switches_of
from engine.flow.argument_flow import are_options, passed_arguments
from engine.flow.dynamic_calls import module_globals
from engine.limits import DEEPEST_INPUT, MOST_CALLS, NEIGHBOURS
from engine.program.graph import Node, Value
from engine.program.trees import tensors_in
from engine.source.callees import own_calls
from engine.source.decorated import signature_of
from engine.source.model_code import code_of, methods_of, words_in

__all__ = ["Arguments", "executed_calls"]


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class _Leaf(NamedTuple):
    """A plain value among the arguments.

    Attributes:
        path: name of the argument, and keys in containers.
        value: its value in the example.
    """

    path: tuple[Any, ...]
    value: Any


class Arguments:
    """The plain values among the arguments of one call, and other values that they may have.

    Args:
        model: the model.
        args, kwargs: of the example.
        declared: returns whether the user declares that an argument keeps its value.
        call: the called function; forward by default, and a ``__call__`` of the model's own class.

    Example:
        >>> class Net(nn.Module):
        ...     def forward(self, x, flip=False, *, scale=1.0):
        ...         return x
        >>> [[kwargs for _, kwargs in calls] for _, calls in Arguments(Net(), (0,), {}).alternatives()][-2:]
        [[{'scale': 0.75}], [{'scale': 0.0}]]
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        declared: Callable[[str], bool] = lambda name: False,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self._declared = declared
        further = [] if call is not None else own_calls(model)
        self._further = [Arguments(model, args, kwargs, declared, own) for own in further]
        self._model, self._signature, self._passed = model, *_bound(call or model.forward, args, kwargs)
        own = self._signature.parameters
        self._values = {name: self._passed.get(name, own[name].default) for name in own}

    @property
    def names(self) -> frozenset[str]:
        """Names of the arguments that hold a number, a flag or a string, and are not declared to keep it."""
        own = (n for n, value in self._values.items() if not self._declared(n) and any(_leaves((n,), value)))
        return frozenset[str]().union(own, *(arguments.names for arguments in self._further))

    def alternatives(self) -> Iterator[tuple[str, Iterator[Call]]]:
        """Yield names of arguments, each with calls in which it has another value."""
        for name, value in self._values.items():
            for leaf in () if self._declared(name) else _leaves((name,), value):
                yield from ((name, map(self._call(leaf), calls)) for calls in self._other_values(name, leaf.value))
        yield from self._with_all_flags()
        for arguments in self._further:
            yield from arguments.alternatives()

    def lengths(self) -> Iterator[Iterator[Call]]:
        """Yield calls in which a container of tensors has more or fewer items, or all lists have more."""
        own = {name: value for name, value in self._values.items() if not self._declared(name)}
        first = next(tensors_in(self._passed), None)
        for name, value in own.items():
            takes_any = self._signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            if takes_any and are_options(self._model, name):
                continue
            is_empty = isinstance(value, (tuple, list)) and not value
            if takes_any and not self._passed.get(name) or is_empty:
                items = [item for item in (first, torch.tensor(0.5)) if item is not None]
                yield from (map(self._call(_Leaf((name,), ())), longer([] if is_empty else (), i)) for i in items)
            for path, container in containers_of_tensors((name,), value):
                call = self._call(_Leaf(path, container))
                yield map(call, longer(container))
                yield from (map(call, way) for way in shorter(container))
        lists = {n: v for n, v in own.items() if isinstance(v, (tuple, list)) and any(True for _ in tensors_in(v))}
        if len(lists) > 1:
            ways = zip(*map(longer, lists.values()), strict=True)
            yield (self._bound({**self._passed, **dict(zip(lists, way, strict=True))}) for way in ways)
        for arguments in self._further:
            yield from arguments.lengths()

    def _with_all_flags(self) -> Iterator[tuple[str, Iterator[Call]]]:
        """Yield a call with all flags on and one with all flags off, if that changes more than one flag."""
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

    def _other_values(self, name: str, value: Any) -> Iterator[list[Any]]:
        """Yield lists of other values: consecutive integers in either direction, or a single other value."""
        if isinstance(value, bool):
            yield [not value]
        elif isinstance(value, float):
            yield from ([other] for other in other_reals(value) if other != value)
        elif isinstance(value, int):
            yield [value + step for step in range(1, NEIGHBOURS + 1)]
            yield [value - step for step in range(1, NEIGHBOURS + 1) if value < 0 or step <= value]
        else:
            others = dict.fromkeys(self._strings(name, value))
            yield from ([other] for other in others if other != value)

    def _strings(self, name: str, value: Any) -> Iterator[Any]:
        """Yield the other strings or enumeration members that the code that receives an argument may expect."""
        codes = passed_arguments(self._model, {name}).by_code
        modules = {type(m): m for m in self._model.modules() if code_of(type(m).forward) in codes}
        spaces = [module_globals(file) for file in sorted({code.co_filename for code in codes})]
        for module in (self._model, *modules.values()):
            yield from choices(value, module, *spaces)
        yield from _strings(value, self._model, *codes)

    def record(self, run: Callable[[Call], bool | None]) -> list[str]:
        """Record the other calls; consecutive integers only up to the first without anything new.

        Args:
            run: records a call, and returns whether it contains anything new, or None if the model rejects it.

        Returns:
            The arguments of which no other value was recorded.
        """
        recorded: dict[str | None, bool] = {}
        remaining = MOST_CALLS
        lengths = ((None, calls) for calls in self.lengths())  # one that accepts one number of items needs no note
        for name, calls in itertools.chain(self.alternatives(), lengths):
            recorded.setdefault(name, False)
            for call in calls:
                remaining -= 1
                new = run(call) if remaining >= 0 else None
                recorded[name] |= new is not None
                if not new:
                    break
        return [name for name, ran in recorded.items() if name is not None and not ran]


def _bound(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return a call's signature and its arguments by name; both empty if there is no signature, or it rejects them."""
    try:
        signature = signature_of(call)
        return signature, signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return inspect.Signature(), {}


def _leaves(path: tuple[Any, ...], value: Any) -> Iterator[_Leaf]:
    """Yield the numbers, flags and strings in an argument and in containers inside of it."""
    if isinstance(value, (bool, int, float, str, Enum)):
        yield _Leaf(path, value)
    elif len(path) <= DEEPEST_INPUT and isinstance(value, (tuple, list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves((*path, key), item)


def _replaced(whole: Any, keys: Sequence[Any], value: Any) -> Any:
    """Return a container with one value replaced."""
    if not keys:
        return value
    key, *rest = keys
    item = _replaced(whole[key], rest, value)
    if isinstance(whole, tuple):
        items = [item if at == key else own for at, own in enumerate(whole)]
        return whole._make(items) if hasattr(whole, "_make") else type(whole)(items)
    changed = copy.copy(whole)
    changed[key] = item
    return changed


def _strings(value: Any, model: nn.Module, *codes: CodeType) -> Iterator[str]:
    """Yield the strings in forward, in methods that it calls and in other code, and one that none of these has."""
    if not isinstance(value, str):
        return
    code = code_of(type(model).forward)
    for method in (*(() if code is None else (code, *_methods_called(model, code))), *codes):
        yield from words_in(method)
    yield "another"


def _methods_called(model: nn.Module, code: CodeType) -> Iterator[CodeType]:
    own = {name for name, _ in methods_of(type(model))}  # type: ignore[arg-type]
    codes = (code_of(getattr(type(model), name)) for name in sorted(own.intersection(code.co_names)))
    return (method for method in codes if method is not None)


def executed_calls(nodes: Sequence[Node], outputs: Sequence[Value]) -> set[tuple[Any, ...]]:
    """Return the calls of a run with their flags and dimensions, and the calls that compute its outputs.

    Args:
        nodes, outputs: of the run.
    """
    calls = {n.index: (n.module, n.op, None if n.site is None else n.site.spot) for n in nodes}
    makers = {value.index: (*calls[n.index], at) for n in nodes for at, value in enumerate(n.outputs)}
    return {(*calls[n.index], switches_of(n)) for n in nodes} | {makers[v.index] for v in outputs if v.index in makers}
