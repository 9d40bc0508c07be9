"""Attributes that are 0.0 or 1.0: gates, scales and probabilities that code outside the model may set.

While a model is recorded, these attributes hold tracked numbers. An argument of an op that is computed from one may
differ in the next call, and comparisons of one are recorded with the other outcome, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from engine.numbers.sizes import Scalar, expression
from engine.program.expressions import Apply, Expr, NumberOf
from engine.source.sites import is_exchanged

__all__ = ["attributes_in", "coefficients", "is_coefficient", "settable_values"]


def coefficients(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the attributes that look like gates: public floats that are zero or one, in classes that are not torch's.

    Example:
        >>> class Blend(nn.Module):
        ...     gain = 1.0
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.alpha, self.eps = 0.0, 1e-5
        >>> dict(coefficients(Blend())), dict(coefficients(nn.Dropout(0.0)))
        ({'gain': 1.0, 'alpha': 0.0}, {})
    """
    if type(module).__module__.startswith("torch.nn.") or is_exchanged(type(module)):
        return
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return
    classes = [base for base in type(module).__mro__ if not base.__module__.startswith("torch.")]
    inherited = {name: value for base in reversed(classes) for name, value in vars(base).items()}
    for name, value in {**inherited, **vars(module)}.items():
        if is_coefficient(value) and name[0] != "_":
            yield name, value


def is_coefficient(value: object) -> bool:
    """Whether a value is 0.0 or 1.0, and so would zero or pass on whatever it is multiplied with."""
    return type(value) is float and value in (0.0, 1.0)


def settable_values(numbers: Iterable[int | float]) -> list[int | float]:
    """Return those of some numbers that are computed from such an attribute, as plain numbers.

    Example:
        >>> settable_values([2, Scalar(0.5, Apply("*", NumberOf("gate", "alpha", 1.0), 0.5))])
        [0.5]
    """
    tagged = (n for n in numbers if isinstance(n, Scalar))
    return [float.__float__(n) for n in tagged if any(True for _ in attributes_in(expression(n)))]


def attributes_in(expr: Expr) -> Iterator[NumberOf]:
    """Yield the attributes in an expression."""
    if isinstance(expr, Apply):
        yield from attributes_in(expr.left)
        yield from attributes_in(expr.right)
    elif isinstance(expr, NumberOf):
        yield expr
