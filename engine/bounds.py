"""Checks of numbers and names that users pass."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from engine.errors import InputError

__all__ = ["as_names", "check_number"]


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
    fits = (
        isinstance(value, numbers.Integral if whole else numbers.Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
    if fits and (least is None or value >= least) and (above is None or value > above):
        return
    infinite = isinstance(value, float) and not math.isfinite(value) and not whole
    what = what or ("an integer" if whole else "a finite number" if infinite else "a number")
    bounds = f" >= {least}" if least is not None else f" > {above}" if above is not None else ""
    raise error(f"`{name}` must be {what}{bounds}, got {value!r}.")


def as_names(name: str, value: str | Iterable[str] | None, error: type[Exception] = InputError) -> tuple[str, ...]:
    """Return one or several names or name patterns as a tuple.

    Args:
        name: name of the argument, for the error.
        value: its value; None counts as none.
        error: class of the error.

    Raises:
        InputError: or ``error``, if it holds anything else than text.

    Example:
        >>> as_names("constants", "embed"), as_names("constants", ["embed", "*.scale"])
        (('embed',), ('embed', '*.scale'))
    """
    several = () if value is None else tuple(value) if _is_list(value) else (value,)
    if not all(isinstance(one, str) for one in several):
        raise error(f"`{name}` must be a name pattern or a list of them, got {value!r}.")
    return several  # type: ignore[return-value]


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)
