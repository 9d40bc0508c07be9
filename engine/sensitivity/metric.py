"""The user's metric function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import InputError
from engine.program.defaults import callers_defaults

__all__ = ["Metric"]


@dataclass(frozen=True)
class Metric:
    """A function with its arguments, whose result is validated.

    Attributes:
        function: returns a number.
        args, kwargs: its arguments.

    Raises:
        InputError: when called, if the function returns anything else, naming ``place``.

    Example:
        >>> Metric(max, (1, 2))("the unpruned model")
        2.0
    """

    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, place: str) -> float:
        """Call the function and return its result as a float.

        Args:
            place: description of the evaluated model, for errors.
        """
        with callers_defaults():
            value = self.function(*self.args, **self.kwargs)
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        try:
            number = float("text" if isinstance(value, (str, bytes)) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__ + shape
            raise InputError(f"`val_func` returns {kind} for {place}; it has to return one number.") from error
        if math.isnan(number):
            raise InputError(f"`val_func` returns NaN for {place}. Let it return a number also for a bad model.")
        return number
