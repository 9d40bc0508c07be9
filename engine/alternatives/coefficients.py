"""Attributes that are 0.0 or 1.0: tracked while a model is recorded, and recorded with other values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from engine.alternatives.attributes import Attribute, Setting
from engine.numbers.coefficients import attributes_in, is_coefficient
from engine.numbers.sizes import Scalar
from engine.program.expressions import Apply, Expr, Guard, NumberOf, evaluate

__all__ = ["Coefficients"]

_OTHERS = (0.25, 1.0, 0.0)


class Coefficients:
    """Attributes that are 0.0 or 1.0, and that code outside a model may set.

    Example:
        >>> layer = nn.Module()
        >>> layer.alpha = 0.0
        >>> coefficients = Coefficients({("layer", "alpha"): layer})
        >>> coefficients.track()
        >>> layer.alpha + 1, type(layer.alpha).__name__
        (1.0, 'Scalar')
        >>> guard = Guard(Apply(">", layer.alpha.expr, 0), False, "here")
        >>> [[(str(a), value) for a, value in setting] for setting in coefficients.settings([guard])]
        [[('layer.alpha', 0.25)]]
    """

    def __init__(self, modules: Mapping[tuple[str, str], nn.Module]) -> None:
        self._modules = modules

    def track(self) -> None:
        """Replace the attributes by tracked numbers; `evaluating` restores them."""
        for (owner, name), module in self._modules.items():
            value = getattr(module, name)
            if is_coefficient(value):
                vars(module)[name] = tracked(owner, name, value)

    def settings(self, guards: Iterable[Guard]) -> Iterator[Setting]:
        """Yield the values at which code that compares these numbers takes another branch.

        Args:
            guards: comparisons of a run.
        """
        compared = [(guard, number) for guard in guards if guard.decides for number in set(attributes_in(guard.expr))]
        decided: set[tuple[Guard, NumberOf]] = set()
        for value in _OTHERS:
            turned = {(g, n) for g, n in compared if (g, n) not in decided and _outcome(g, n, value) != g.outcome}
            decided |= turned
            chosen = dict.fromkeys((n.module, n.name) for g, n in compared if (g, n) in turned)
            if chosen:
                yield [
                    (Attribute(owner, self._modules[owner, name], name), tracked(owner, name, value))
                    for owner, name in chosen
                ]


def tracked(owner: str, name: str, value: float) -> Scalar:
    """Return a number that is tracked as the value of an attribute."""
    return Scalar(value, NumberOf(owner, name, value))


def _outcome(guard: Guard, number: NumberOf, value: float) -> Any:
    def shape_of(other: Any) -> tuple[int, ...]:
        return other.shape  # type: ignore[no-any-return]

    return bool(evaluate(_replaced(guard.expr, number, value), shape_of, lambda leaf: 1))


def _replaced(expr: Expr, number: NumberOf, value: float) -> Expr:
    if isinstance(expr, Apply):
        return Apply(expr.symbol, _replaced(expr.left, number, value), _replaced(expr.right, number, value))
    return value if expr == number else expr
