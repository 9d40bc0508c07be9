"""What compensation did, by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Compensated", "CompensationReport"]


@dataclass(frozen=True)
class Compensated:
    """What compensation did for the readers of a group's masked channels.

    Attributes:
        before: squared error of their outputs, on held-out samples, relative to the squared target.
        after: the same, with the weights that were chosen.
        layers: names of the layers whose weights were fitted.
        skipped: why other readers were left as they are, by the layer's name.
    """

    before: float
    after: float
    layers: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


class CompensationReport(dict[str, Compensated]):
    """What was done, by group.

    Example:
        >>> report = CompensationReport({"0": Compensated(0.25, 0.01, ("2",), {})})
        >>> print(report)
        0: error 0.25 -> 0.01
    """

    def __str__(self) -> str:
        lines = [f"{name}: error {row.before:.3g} -> {row.after:.3g}" for name, row in self.items()]
        skipped = [f"  {layer}: {why}" for row in self.values() for layer, why in row.skipped.items()]
        return "\n".join([*lines, *skipped])
