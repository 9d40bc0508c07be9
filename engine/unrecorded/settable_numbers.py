"""Numbers computed from attributes that code sets later: recording neighbouring values is not enough."""

from __future__ import annotations

from collections.abc import Collection

from engine.numbers.sizes import numbers_in
from engine.observations.assumptions import Assumptions
from engine.observations.recorded_runs import RecordedRuns
from engine.program.expressions import AttributeOf, Expr, SetLater, leaves

__all__ = ["doubt_numbers_set_later", "reads_attribute"]


def doubt_numbers_set_later(runs: RecordedRuns, assumptions: Assumptions) -> None:
    """Doubt numbers among the arguments of ops that are computed from attributes that code sets later.

    ``x[:, : 4 + self.step // 100]`` takes the same amount one step earlier or later. If the model accepts no other
    value of an attribute, such as a number of heads that has to divide the channels, the notes name it instead.

    Args:
        runs: the recordings.
        assumptions: is extended.
    """
    settable = frozenset(runs.recorded_later)
    for node in runs.nodes if settable else ():
        numbers = [
            numbers_in(node.args[name])[place]
            for (name, place), expr in node.sizes.items()
            if reads_attribute(expr, settable)
        ]
        if numbers:
            assumptions.doubt(node, [n if isinstance(n, float) else SetLater(n) for n in numbers])


def reads_attribute(expr: Expr, attributes: Collection[tuple[str, str]]) -> bool:
    """Whether a number is computed from one of some attributes, or from an item of one.

    Args:
        expr: of the number.
        attributes: by module and name.

    Example:
        >>> [reads_attribute(AttributeOf("stem", name), [("stem", "sizes")]) for name in ("sizes[0]", "heads")]
        [True, False]
    """
    own = (leaf for leaf in leaves(expr) if isinstance(leaf, AttributeOf))
    return any((leaf.module, leaf.name.partition("[")[0]) in attributes for leaf in own)
