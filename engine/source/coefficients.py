"""Floats of zero or one in attributes: gates, scales and probabilities that code outside the model may set.

While recording they are handed out as numbers that remember where they are from. What an op is given of one may be
another number at the next call, and a comparison of one is recorded with the other outcome as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from engine.program.expressions import Apply, Expr, NumberOf
from engine.source.sizes import Scalar, expression

__all__ = ["coefficients", "is_coefficient", "numbers_of", "settable"]


def coefficients(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the attributes that look like gates: public, a float, zero or one, of a class that is not torch's own.

    Example:
        >>> class Blend(nn.Module):
        ...     gain = 1.0
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.alpha, self.eps = 0.0, 1e-5
        >>> dict(coefficients(Blend())), dict(coefficients(nn.Dropout(0.0)))
        ({'gain': 1.0, 'alpha': 0.0}, {})
    """
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, nn.modules.batchnorm._NormBase):
        return
    classes = [base for base in type(module).__mro__ if not base.__module__.startswith("torch.")]
    inherited = {name: value for base in reversed(classes) for name, value in vars(base).items()}
    for name, value in {**inherited, **vars(module)}.items():
        if is_coefficient(value) and name[0] != "_":
            yield name, value


def is_coefficient(value: object) -> bool:
    """Whether a number opens or closes what it is multiplied with."""
    return type(value) is float and value in (0.0, 1.0)


def settable(numbers: Iterable[int | float]) -> list[int | float]:
    """Return, as plain numbers, those that follow from an attribute which may be set.

    Example:
        >>> settable([2, Scalar(0.5, Apply("*", NumberOf("gate", "alpha", 1.0), 0.5))])
        [0.5]
    """
    tagged = (n for n in numbers if isinstance(n, Scalar))
    return [float.__float__(n) for n in tagged if any(True for _ in numbers_of(expression(n)))]


def numbers_of(expr: Expr) -> Iterator[NumberOf]:
    """Yield the attributes that an expression follows from."""
    if isinstance(expr, Apply):
        yield from numbers_of(expr.left)
        yield from numbers_of(expr.right)
    elif isinstance(expr, NumberOf):
        yield expr
