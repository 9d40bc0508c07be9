"""Report of a compensation, by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Compensated", "CompensationReport"]


@dataclass(frozen=True)
class Compensated:
    """Compensation of the layers that read a group's masked channels.

    Attributes:
        before: squared error of their outputs on held-out samples, relative to the squared target.
        after: the same error with the fitted weights.
        layers: names of the fitted layers.
        skipped: reasons why other layers were not changed, by name.
    """

    before: float
    after: float
    layers: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)


class CompensationReport(dict[str, Compensated]):
    """Results of a compensation, by group.

    Example:
        >>> report = CompensationReport({"0": Compensated(0.25, 0.01, ("2",), {})})
        >>> print(report)
        0: error 0.25 -> 0.01
    """

    def __str__(self) -> str:
        lines = [f"{name}: error {row.before:.3g} -> {row.after:.3g}" for name, row in self.items()]
        skipped = [f"  {layer}: {why}" for row in self.values() for layer, why in row.skipped.items()]
        return "\n".join([*lines, *skipped])
