"""Result of a sensitivity analysis: layers by sparsities, as CSV, as a plot, and as amounts to prune."""

from __future__ import annotations

import csv
import glob
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from engine import html
from engine.bounds import check_kinds, is_list, is_number
from engine.errors import InputError
from engine.plots import sensitivity_figure, show

__all__ = ["DIGITS", "SensitivityTable", "columns", "fraction"]

DIGITS = 10  # so that 0.1 + 0.2 is 0.3


class SensitivityTable(dict[str, dict[float, float]]):
    """Layer -> sparsity -> metric, in the order of the model.

    Args:
        rows: the metrics.
        sparsities: the columns, ascending; the row of a stopped sweep is shorter.
        baseline: metric of the unpruned model.
        better: ``"higher"`` or ``"lower"`` metrics are better; None: see `suggest`.

    Raises:
        InputError: by `suggest` and `plot`, for invalid arguments.

    Example:
        >>> table = SensitivityTable({"a": {0.5: 0.8}, "b": {0.5: 0.2}}, [0.5], baseline=0.9)
        >>> table
        metric with one layer pruned (0.9 with none)
        layer  50%
        a      0.8
        b      0.2
        >>> table.suggest(0.2)
        {'a': 0.5, 'b': 0.0}
    """

    def __init__(
        self,
        rows: Mapping[str, Mapping[float, float]],
        sparsities: Sequence[float],
        baseline: float,
        better: str | None = None,
    ) -> None:
        super().__init__({layer: dict(row) for layer, row in rows.items()})
        self.sparsities, self.baseline, self.better = list(sparsities), baseline, better

    def __str__(self) -> str:
        head = ["layer", *(f"{s:.0%}" for s in self.sparsities)]
        lines = [head, *([layer, *self._cells(row)] for layer, row in self.items())]
        widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
        texts = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        return "\n".join([f"metric with one layer pruned ({self.baseline:.4g} with none)", *texts])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(layer, *self._cells(row)) for layer, row in self.items()]
        heads = ("layer", *(f"{s:.0%}" for s in self.sparsities))
        return html.table(f"metric with one layer pruned ({self.baseline:.4g} with none)", heads, rows)

    def _cells(self, row: Mapping[float, float]) -> list[str]:
        return [f"{row[s]:.4g}" if s in row else "-" for s in self.sparsities]

    def export(self, filepath: str | os.PathLike[str]) -> None:
        """Write the table as CSV: the header ``layername,0.1,0.2…``, then a row per layer.

        Args:
            filepath: file to write.
        """
        check_kinds(SensitivityTable.export, locals())
        with open(filepath, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["layername", *map(str, self.sparsities)])
            writer.writerows([layer, *(row[s] for s in sorted(row))] for layer, row in self.items())

    def suggest(self, budget: float, better: str | None = None) -> dict[str, float]:
        r"""Return how much of each layer can be pruned: the largest sparsity within a budget of the metric.

        .. math:: a_l = \max \{ s : \text{loss}_l(s') \le budget \text{ for all } s' \le s \}

        where the loss is the deterioration of the metric compared to the unpruned model. The budget applies to each
        layer separately; pruning all of them costs more.

        Args:
            budget: allowed deterioration, in units of the metric, 0 or more.
            better: ``"higher"`` (accuracy) or ``"lower"`` (loss). None: from the early-stop mode; without one, assume
                that the largest sparsity makes the metric of most layers worse.

        Returns:
            ``{layer: fraction of its channels}``, 0.0 for a layer that cannot lose any; pass it to ``ChannelPruning``
            as ``amount``.

        Raises:
            InputError: for a negative budget, or if it is unclear which metrics are better.
        """
        if not is_number(budget) or not budget >= 0:
            raise InputError(f"`budget` is how much worse the metric may get, 0 or more; got {budget!r}.")
        sign = 1.0 if self.direction(better) == "lower" else -1.0
        amounts = {}
        for layer, row in self.items():
            amount = 0.0
            for sparsity in sorted(row):
                if sign * (row[sparsity] - self.baseline) > budget:
                    break
                amount = sparsity
            amounts[glob.escape(layer)] = amount  # `ChannelPruning` treats names as patterns
        return amounts

    def direction(self, better: str | None = None) -> str:
        """Return which metrics are better, ``"higher"`` or ``"lower"``.

        Args:
            better: one of these, or None; see `suggest`.

        Raises:
            InputError: for any other value, or if the table does not determine it.
        """
        if better not in ("higher", "lower", None):
            raise InputError(f"`better` is 'higher' or 'lower'; got {better!r}.")
        ends = [row[max(row)] - self.baseline for row in self.values() if row]
        change = (statistics.median(ends) or statistics.fmean(ends)) if ends else 0.0
        direction = better or self.better or ("higher" if change < 0 else "lower" if change > 0 else None)
        if direction is None:
            raise InputError(
                "Pruning does not change the metric; pass which is better, `better='higher'` or `'lower'`."
            )
        return direction

    def plot(self, path: str | os.PathLike[str] | None = None, kind: str = "heatmap", *, writer: Any = None) -> Any:
        """Plot the table.

        Args:
            path: image file to write; its extension determines the format. None: no file.
            kind: ``"heatmap"`` (layers down, sparsities across) or ``"curves"`` (a line per layer).
            writer: a TensorBoard ``SummaryWriter`` that also gets the plot, as ``sensitivity/<kind>``.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: if matplotlib is not installed, the extra ``plots``.
            InputError: for an unknown kind.
        """
        return show(sensitivity_figure(self, self.sparsities, self.baseline, kind), path, writer, f"sensitivity/{kind}")


def fraction(value: Any, name: str) -> float:
    """Return a number in [0, 1), rounded to `DIGITS` decimals; ``name`` is used in the error.

    Raises:
        InputError: for anything else.
    """
    number = not isinstance(value, (bool, str, bytes)) and hasattr(value, "__float__")
    if not number or not 0 <= float(value) < 1:
        raise InputError(f"{name} is a fraction in [0, 1); got {value!r}.")
    return round(float(value), DIGITS)


def columns(sparsities: Sequence[float] | None) -> list[float]:
    """Return the sparsities to evaluate, ascending and unique; 0.1 … 0.9 by default.

    Raises:
        InputError: for values other than fractions in [0, 1), or an empty list.

    Example:
        >>> columns([0.5, 0.1 + 0.2])
        [0.3, 0.5]
    """
    candidates = [n / 10 for n in range(1, 10)] if sparsities is None else sparsities
    if isinstance(candidates, bytes) or not is_list(candidates):
        raise InputError(f"`sparsities` is a list of fractions; got {sparsities!r}.")
    fractions = sorted({fraction(value, "Each of `sparsities`") for value in candidates})
    if not fractions:
        raise InputError("`sparsities` is empty; give at least one fraction.")
    return fractions
