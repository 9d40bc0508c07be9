"""The arguments of a model's forward, and the functions that receive them under other names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from engine.flow.argument_flow import PassedArguments, are_options, passed_arguments
from engine.flow.choices import Choices, functions_in_class, is_plain_class
from engine.numbers.sized_places import has_place
from engine.program.trees import tensors_in
from engine.source.callees import own_calls
from engine.source.decorated import signature_of
from engine.source.model_code import code_of, functions_of, module_namespaces

__all__ = ["ForwardArguments", "functions_that_choose"]


class ForwardArguments:
    """The arguments of a model's forward that other calls may pass with other values than the example.

    Args:
        model: the model.
        args, kwargs: of the example.
        declared: returns whether the user declares that an argument keeps its value.
        sized: places at which sizes decide that differ between inputs; what they choose is an option, too.

    Attributes:
        codes: of forward, and of the class's own ``__call__``.

    Example:
        >>> class Net(nn.Module):
        ...     def forward(self, x, mask=None):
        ...         return x if mask is None else x * mask
        >>> import torch
        >>> ForwardArguments(Net(), (torch.zeros(1),), {}).options_of(Net.forward.__code__)
        {'mask'}
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        declared: Callable[[str], bool] = lambda name: False,
        sized: Collection[str] = (),
    ) -> None:
        calls = own_calls(model)
        bound = [_bound(function, args, kwargs) for function in (*calls, model.forward)]
        bound += [_bound(model.forward, (), {})] if calls and bound[-1] is None else []  # it gets other arguments
        self._names, options = map(set[str]().union, *map(_names_and_options, bound))
        self._options = {name for name in options if not declared(name)}
        self._passed = passed_arguments(
            model,
            self._options,
            Choices(functions_that_choose(model, lambda code: has_place(code, sized)), sized) if sized else None,
        )
        self.codes = {code_of(type(model).forward), *(call.__code__ for call in calls)}
        self._omitted = {name for one in bound for name in _omitted(one, model) if not declared(name)}
        self._omitted_elsewhere = passed_arguments(model, self._omitted) if self._omitted else PassedArguments()

    def options_of(self, code: CodeType) -> Collection[str]:
        """Return the arguments of a function that are no tensors in the example: forward's own, and those they reach.

        Args:
            code: of the function.
        """
        return self._options if code in self.codes else self._passed.by_code.get(code, frozenset())

    def omitted_in(self, code: CodeType) -> Collection[str]:
        """Return the arguments of a function that are None or empty in the example, but may not be in other calls.

        Args:
            code: of the function.
        """
        return self._omitted if code in self.codes else self._omitted_elsewhere.by_code.get(code, frozenset())

    def that_vary_in(self, code: CodeType, module: nn.Module | None = None) -> set[str]:
        """Return the names of forward's arguments, and those under which a function receives some of them.

        Args:
            code: of the function.
            module: restricts the result to calls of this module; all modules by default.
        """
        passed = self._passed
        return self._names | (
            passed.by_code.get(code, frozenset()) if module is None else passed.of_module(code, module)
        )


def _bound(function: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments | None:
    """Return the arguments of an example by name; None if forward has no signature, or rejects them."""
    try:
        return signature_of(function).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return None


def _names_and_options(bound: inspect.BoundArguments | None) -> tuple[set[str], set[str]]:
    """Return the names of the arguments of forward, and of those that are no tensors in the example."""
    if bound is None:
        return set(), set()
    names = set(bound.signature.parameters)
    return names, names - {name for name, value in bound.arguments.items() if any(True for _ in tensors_in(value))}


def _omitted(bound: inspect.BoundArguments | None, model: nn.Module) -> set[str]:
    """Return the arguments of forward that are None or empty, in their items as well.

    ``*args`` that forward only passes on are options of other functions, where these have defaults.
    """
    if bound is None:
        return set()
    defaults = inspect.BoundArguments(bound.signature, bound.arguments.copy())
    defaults.apply_defaults()
    empty = {name for name, value in defaults.arguments.items() if _is_empty(value)}
    rest = {p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_POSITIONAL} & empty
    return empty - {name for name in rest if are_options(model, name)}


def _is_empty(value: Any) -> bool:
    """Whether a value is None, or a container without anything else."""
    items = value.values() if isinstance(value, dict) else value
    return value is None or type(value) in (tuple, list, dict, set) and all(map(_is_empty, items))


def functions_that_choose(model: nn.Module, chooses: Callable[[CodeType], bool]) -> Sequence[FunctionType | MethodType]:
    """Return the functions, methods of modules and of classes in their files that choose something, and their callers.

    Callers are found by name only: one too many does no harm.

    Args:
        model: the model.
        chooses: returns whether a function does, given its code.
    """
    functions: dict[FunctionType | MethodType, set[str]] = {  # with the names that callers mention
        MethodType(function, module): {function.__name__}
        for module in model.modules()
        for function in functions_of(type(module))  # type: ignore[arg-type]
    }
    for space in module_namespaces(model):
        for item in list(space.values()):
            if isinstance(item, FunctionType):
                functions[item] = {item.__name__}
            elif is_plain_class(item) and item.__module__ == space.get("__name__"):
                for function in functions_in_class(item):  # subclasses have it as well
                    functions.setdefault(function, set()).update((function.__name__, item.__name__))
    choosing = [function for function in functions if chooses(function.__code__)]
    waiting = set().union(*map(functions.__getitem__, choosing)) - {"forward"}
    codes = {function.__code__ for function in choosing}
    while waiting:
        callers = [f for f in functions if f.__code__ not in codes and not waiting.isdisjoint(f.__code__.co_names)]
        choosing += callers
        codes.update(function.__code__ for function in callers)
        waiting = set().union(*map(functions.__getitem__, callers)) - {"forward"}
    return choosing
