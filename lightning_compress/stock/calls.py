"""Constructor calls as trees of arguments: recorded while a network is built, modified, repeated, and written out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

from lightning_compress.stock.fields import Path, Values, set_numbers

__all__ = ["Call", "fields_of", "recorded", "source_of_call", "with_values"]

_PRIMITIVES = (bool, int, float, str, type(None))


class Call(dict[str, Any]):
    """A call with its arguments.

    Attributes:
        function: the function or class.
        is_partial: whether the result is a `functools.partial` instead of a call.

    Example:
        >>> Call(complex, real=1.0, imag=2.0).result()
        (1+2j)
    """

    def __init__(self, function: Callable[..., Any], is_partial: bool = False, **arguments: Any) -> None:
        super().__init__(arguments)
        self.function, self.is_partial = function, is_partial

    def __deepcopy__(self, memo: Any) -> Call:
        return Call(self.function, self.is_partial, **{name: copy.deepcopy(v, memo) for name, v in self.items()})

    def result(self) -> Any:
        """Make the call."""
        arguments = {name: _built(value) for name, value in self.items()}
        return functools.partial(self.function, **arguments) if self.is_partial else self.function(**arguments)


def _built(value: Any) -> Any:
    if isinstance(value, Call):
        return value.result()
    if isinstance(value, dict):
        return type(value)((key, _built(item)) for key, item in value.items())
    return type(value)(map(_built, value)) if type(value) in (list, tuple) else value


def with_values(call: Call, values: Values) -> Call:
    """Return a call with other numbers.

    Example:
        >>> with_values(Call(complex, real=1.0), {("real",): 3.0}).result()
        (3+0j)
    """
    return Call(call.function, call.is_partial, **set_numbers(call, values))


def fields_of(call: Call) -> dict[Path, int | float | None]:
    """Return the numbers among the arguments of a call, and the arguments that are None, which may accept one.

    Example:
        >>> fields_of(Call(dict, width=8, blocks=[[1, 2]], bias=True, rate=None))
        {('width',): 8, ('blocks', 0, 0): 1, ('blocks', 0, 1): 2, ('rate',): None}
    """
    return dict(_fields(call, ()))


def _fields(value: Any, path: Path) -> Iterator[tuple[Path, int | float | None]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _fields(item, (*path, key))
    elif type(value) in (list, tuple):
        for place, item in enumerate(value):
            if item is not None:
                yield from _fields(item, (*path, place))
    elif type(value) in (int, float) or value is None:
        yield path, value


def recorded(build: Callable[[], Any], cls: type) -> Call | None:
    """Record the call of a class's constructor by a function; None if it cannot be repeated.

    Plain objects among its arguments, such as the settings of blocks, become calls, too.

    Args:
        build: function that returns an instance of the class.
        cls: the exact class.
    """
    calls = _calls(build, {cls})
    kinds = {type(value) for call in calls.values() for value in _objects(call)}
    if kinds:
        calls = _calls(build, {cls, *kinds})
    last = [call for call in calls.values() if call.function is cls]
    return _tree(last[-1], calls) if last else None


def _calls(build: Callable[[], Any], classes: Iterable[type]) -> dict[int, Call]:
    """Record the constructors' calls by the id of the instance."""
    calls: dict[int, Call] = {}
    instances: list[Any] = []  # keeps the instances alive, so that ids are unique
    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.enter_context(_noting(cls, calls, instances))
        instances.append(build())
    return calls


@contextlib.contextmanager
def _noting(cls: Any, calls: dict[int, Call], instances: list[Any]) -> Iterator[None]:
    """Record the arguments of a class's constructor inside the context."""
    own, init = "__init__" in vars(cls), cls.__init__

    @functools.wraps(init)
    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is cls:
            bound = _bound(init, self, args, kwargs)
            instances.append(self)
            if bound is not None:
                calls[id(self)] = Call(cls, **bound)
        init(self, *args, **kwargs)

    try:
        cls.__init__ = note
        yield
    finally:
        if own:
            cls.__init__ = init
        else:
            del cls.__init__


def _bound(init: Any, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by name, including defaults; None if some have no name."""
    signature = inspect.signature(init)
    bound = signature.bind(self, *args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for (name, value), parameter in zip(
        list(bound.arguments.items())[1:], list(signature.parameters.values())[1:], strict=True
    ):
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            return None
        arguments |= value if parameter.kind is parameter.VAR_KEYWORD else {name: value}
    return {name: value for name, value in arguments.items() if name not in ("self", "function", "is_partial")}


def _objects(value: Any) -> Iterator[Any]:
    """Yield the plain objects in arguments."""
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _objects(item)
    elif isinstance(value, functools.partial):
        yield from _objects(value.keywords)
    elif not isinstance(value, (*_PRIMITIVES, type, FunctionType, BuiltinFunctionType)):
        yield value


def _tree(value: Any, calls: Mapping[int, Call]) -> Any:
    """Replace objects among arguments by calls."""
    if isinstance(value, Call):
        return Call(value.function, value.is_partial, **{name: _tree(item, calls) for name, item in value.items()})
    if isinstance(value, functools.partial) and not value.args:
        return Call(value.func, True, **{name: _tree(item, calls) for name, item in value.keywords.items()})
    if id(value) in calls:
        return _tree(calls[id(value)], calls)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
        return Call(type(value), **{name: _tree(item, calls) for name, item in own.items()})
    if type(value) is dict:
        return {key: _tree(item, calls) for key, item in value.items()}
    return type(value)(_tree(item, calls) for item in value) if type(value) in (list, tuple) else value


def source_of_call(call: Call) -> tuple[list[str], str] | None:
    """Return the imports of a call, and the call as source; None if an argument cannot be imported by name.

    Arguments with their default value are omitted; each of the others has its own line.

    Example:
        >>> from torch import nn
        >>> call = Call(nn.Linear, in_features=2, out_features=3, bias=True, device=None, dtype=None)
        >>> imports, text = source_of_call(call)
        >>> print(*imports, text, sep="\\n")
        import torch.nn.modules.linear
        torch.nn.modules.linear.Linear(
            in_features=2,
            out_features=3,
        )
    """
    modules: set[str] = set()
    try:
        arguments = [f"    {name}={_text(item, modules)},\n" for name, item in _changed(call).items()]
        text = f"{_name(call.function, modules)}(\n{''.join(arguments)})"
    except _NoName:
        return None
    return [f"import {module}" for module in sorted(modules)], text


class _NoName(Exception):
    """Raised for a value that cannot be written as an expression."""


def _text(value: Any, modules: set[str]) -> str:
    if isinstance(value, Call):
        arguments = [f"{name}={_text(item, modules)}" for name, item in _changed(value).items()]
        function = _name(value.function, modules)
        if not value.is_partial:
            return f"{function}({', '.join(arguments)})"
        modules.add("functools")
        return f"functools.partial({', '.join([function, *arguments])})"
    if type(value) is dict:
        return "{" + ", ".join(f"{_text(key, modules)}: {_text(item, modules)}" for key, item in value.items()) + "}"
    if type(value) in (list, tuple):
        items = ", ".join(_text(item, modules) for item in value)
        return f"[{items}]" if type(value) is list else f"({items}{',' * (len(value) == 1)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if type(value) in _PRIMITIVES else _name(value, modules)


def _changed(call: Call) -> dict[str, Any]:
    """Return the arguments that differ from their defaults."""
    try:
        parameters = inspect.signature(call.function).parameters
    except (TypeError, ValueError):  # a class written in C
        return call
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return {name: v for name, v in call.items() if name not in defaults or not _equal(v, defaults[name])}


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and (value is default or type(value) in _PRIMITIVES and value == default)


def _name(value: Any, modules: set[str]) -> str:
    """Return the qualified name of a class or function."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or "<" in path or module == "__main__":
        raise _NoName
    owner: Any = importlib.import_module(module)
    for part in path.split("."):
        owner = getattr(owner, part, None)
    if owner is not value:
        raise _NoName
    if module == "builtins":
        return str(path)
    modules.add(module)
    return f"{module}.{path}"
