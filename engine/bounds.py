"""Checks of numbers and of other arguments that users pass."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np

from engine.errors import EngineError, InputError

__all__ = ["as_names", "calling", "check_kinds", "check_number", "is_list", "is_number"]

_NUMBERS = (float, int)
_ITERABLES = (Sequence, Collection, Iterable, list)
_DESCRIPTIONS: dict[Any, str] = {
    NoneType: "None",
    Callable: "a function",
    Collection: "a list",
    Iterable: "an iterable",
    Mapping: "a mapping",
    Path: "a path",
    Sequence: "a list",
    bool: "True or False",
    dict: "a dictionary",
    float: "a number",
    int: "an integer",
    list: "a list",
    os.PathLike: "a path",
    str: "a string",
    type: "a class",
}


def check_number(
    name: str,
    value: Any,
    least: float | None = None,
    *,
    above: float | None = None,
    whole: bool = False,
    what: str | None = None,
    error: type[Exception] = InputError,
) -> None:
    """Check that an argument is a finite number, and neither NaN nor a truth value.

    Args:
        name: name of the argument, for the error.
        value: its value.
        least: the smallest valid number.
        above: a number that it has to exceed.
        whole: whether it must be an integer.
        what: what the number is, for the error.
        error: class of the error.

    Raises:
        InputError: or ``error``, naming the argument and its value.

    Example:
        >>> check_number("ridge", float("nan"), 0)
        Traceback (most recent call last):
        ...
        engine.errors.InputError: `ridge` must be a finite number >= 0, got nan.
    """
    fits = is_number(value, whole) and math.isfinite(value)
    if fits and (least is None or value >= least) and (above is None or value > above):
        return
    infinite = isinstance(value, float) and not math.isfinite(value) and not whole
    what = what or ("an integer" if whole else "a finite number" if infinite else "a number")
    bounds = f" >= {least}" if least is not None else f" > {above}" if above is not None else ""
    raise error(f"`{name}` must be {what}{bounds}, got {value!r}.")


def is_number(value: Any, whole: bool = False) -> bool:
    """Return whether a value is a number (also one of NumPy's) and not a bool.

    Args:
        value: the value.
        whole: whether it has to be an integer.

    Example:
        >>> is_number(np.float32(0.5)), is_number(0.5, whole=True), is_number(True)
        (True, False, False)
    """
    return isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, (bool, np.bool_))


def as_names(name: str, value: str | Iterable[str] | None, error: type[Exception] = InputError) -> tuple[str, ...]:
    """Return one or several names or name patterns as a tuple.

    Args:
        name: name of the argument, for the error.
        value: its value; None counts as none.
        error: class of the error.

    Raises:
        InputError: or ``error``, if it contains anything but text.

    Example:
        >>> as_names("constants", "embed"), as_names("constants", ["embed", "*.scale"])
        (('embed',), ('embed', '*.scale'))
    """
    several = () if value is None else tuple(value) if is_list(value) else (value,)
    if not all(isinstance(one, str) for one in several):
        raise error(f"`{name}` must be a name pattern or a list of them, got {value!r}.")
    return several  # type: ignore[return-value]


def is_list(value: Any) -> bool:
    """Return whether a value is iterable, and neither text nor a tensor or array that is a single number.

    Example:
        >>> is_list([1]), is_list("a"), is_list(np.array(1))
        (True, False, False)
    """
    return isinstance(value, Iterable) and not isinstance(value, str) and not _is_single(value)


def _is_single(value: Any) -> bool:
    return getattr(value, "ndim", None) == 0  # has `__iter__`, which fails


@contextmanager
def calling(what: str, error: type[Exception] = InputError) -> Iterator[None]:
    """Turn whatever a function of the user raises into an error that says which one ran, and what it ran for.

    Args:
        what: the function and what it is called for, as the subject of a sentence.
        error: class of the error.

    Raises:
        InputError: or ``error``, from the original one. Errors of the engine, and of this class, are passed on.

    Example:
        >>> with calling("`val_func`"):
        ...     {}["accuracy"]
        Traceback (most recent call last):
        ...
        engine.errors.InputError: `val_func` failed: KeyError: 'accuracy'
    """
    try:
        yield
    except (EngineError, error):
        raise
    except Exception as cause:
        raise error(f"{what} failed: {type(cause).__name__}: {cause}") from cause


def check_kinds(function: Callable[..., Any], values: Mapping[str, Any], error: type[Exception] = InputError) -> None:
    """Check that arguments are of the kinds with which a function's parameters are annotated.

    What lists and mappings hold is not checked, nor are parameters that only take numbers: `check_number` is for those.

    Args:
        function: the function.
        values: its arguments by name, ``locals()`` at its beginning.
        error: class of the error.

    Raises:
        InputError: or ``error``, naming the first argument that does not fit.

    Example:
        >>> def draw(path: str | None, bars: bool = False) -> None:
        ...     check_kinds(draw, locals())
        >>> draw(None), draw(3)
        Traceback (most recent call last):
        ...
        engine.errors.InputError: `path` must be a string or None, got 3.
    """
    for name, kinds in _parameters(function):
        if not any(_fits(values[name], kind) for kind in kinds):
            described = dict.fromkeys(_DESCRIPTIONS.get(kind) or f"a `{kind.__name__}`" for kind in kinds)
            value, hint = reprlib.repr(values[name]), _hint(values[name], kinds)
            raise error(f"`{name}` must be {' or '.join(described)}, got {value}{hint}.")


def _hint(value: Any, kinds: Sequence[Any]) -> str:
    """Return what to do about a class in the place of its instance."""
    own = isinstance(value, type) and any(isinstance(kind, type) and issubclass(value, kind) for kind in kinds)
    return f"; pass an instance, `{value.__name__}(...)`" if own else ""


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the parameters to check, each with the classes of which its argument may be."""
    parameters, names = inspect.signature(function).parameters.values(), inspect.unwrap(function).__globals__
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    kinds = {p.name: _classes(p.annotation, names) for p in named}
    return [(name, some) for name, some in kinds.items() if not set(some) <= {*_NUMBERS, NoneType}]


def _classes(annotation: Any, names: dict[str, Any]) -> tuple[Any, ...]:
    """Return the classes that an annotation names; none if it admits anything, or is only there for type checkers."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, names)  # of this package's own code
        except NameError:
            return ()
    union = get_origin(annotation) in (Union, UnionType)
    parts = get_args(annotation) if union else (annotation,)
    kinds = [NoneType if part is None else get_origin(part) or part for part in parts]
    return tuple(kinds) if all(map(_can_be_asked, kinds)) else ()


def _can_be_asked(kind: Any) -> bool:
    own = isinstance(kind, type) and kind not in (Any, inspect.Parameter.empty)
    return own and not getattr(kind, "_is_protocol", False)


def _fits(value: Any, kind: Any) -> bool:
    if kind in _NUMBERS:
        return is_number(value, whole=kind is int)
    if kind is bool:
        return isinstance(value, (bool, np.bool_))
    if kind in _ITERABLES:  # a tensor, an array or a dataset serves as well
        other = isinstance(value, (str, bytes, Mapping, numbers.Number, type))  # numbers of NumPy have `__getitem__`
        return not other and not _is_single(value) and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))
    return isinstance(value, os.PathLike if kind is Path else kind)
