r"""Ridge regression toward the current weights.

With rows :math:`\varphi` of inputs of a weight, and the residual :math:`R = T - \varphi W - b` of the target, the
weight changes by

.. math:: \Delta = (\varphi^\top \varphi + \lambda I)^{-1} \varphi^\top R, \qquad
          \lambda = \mathrm{ridge} \cdot \operatorname{mean} \operatorname{diag} \varphi^\top \varphi

With fewer rows than columns, the equivalent system of one equation per row is solved, which needs less memory:

.. math:: \Delta = \varphi^\top (\varphi \varphi^\top + \lambda I)^{-1} R

If a bias can absorb the means, :math:`\varphi` and :math:`R` are centred. Inputs that are constant on the samples then
consist of rounding errors only, so the mean diagonal is at least :math:`10^{-9}` of its value before centring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.compensation.weights import Alone, Processes
from engine.errors import InputError

__all__ = ["Correction", "correction", "squared_error"]

_ALONE = Alone()
_VARIES = 1e-9  # fraction of the mean square of the inputs below which a variance is rounding


@dataclass(frozen=True, eq=False)
class Correction:
    """Change of a weight and its bias.

    Attributes:
        weight: float64, (outputs, columns).
        shift: change of the bias, float64, (outputs,).
    """

    weight: Tensor
    shift: Tensor


def correction(
    rows: Tensor,
    residual: Tensor,
    support: Tensor,
    ridge: float,
    shifts: bool,
    name: str,
    processes: Processes = _ALONE,
) -> Correction:
    """Fit the change of a weight that brings its output closest to a target.

    Args:
        rows: inputs, float64, (rows, columns).
        residual: target minus the current output of the weight, float64, (rows, outputs).
        support: entries that may change, bool, (outputs, columns).
        ridge: weight of the penalty on the change, relative to the mean diagonal of the Gram matrix.
        shifts: whether a bias, or a substitute for one, can absorb a shift.
        name: name of the layer, for the error.
        processes: those that hold other rows of the same system.

    Raises:
        InputError: if the system is singular, which is only possible with ``ridge=0``.

    Example:
        >>> rows = torch.eye(3, dtype=torch.float64)
        >>> change = correction(rows, rows @ torch.ones(3, 2).double(), torch.ones(2, 3) > 0, 0.0, False, "layer")
        >>> bool(torch.allclose(change.weight, torch.ones(2, 3).double()))
        True
    """
    summed, alone = processes.summed, isinstance(processes, Alone)
    means = [side.new_zeros(side.size(1)) for side in (rows, residual)]
    if shifts:
        count = summed(rows.new_tensor(len(rows)))
        means = [summed(side.sum(0)) / count for side in (rows, residual)]
    squares = summed(rows.square().sum(0))
    rows, residual = rows - means[0], residual - means[1]
    weight = rows.new_zeros(residual.size(1), rows.size(1))
    for outputs, columns in _patterns(support):
        if ridge and not squares[columns].any():
            continue  # inputs that are zero on all samples do not determine their weights
        part = rows if len(columns) == rows.size(1) else rows[:, columns]
        few = alone and len(part) < len(columns)  # rows of other processes would have to come here
        if few and not ridge:
            raise _singular(name, len(columns))
        gram = part @ part.T if few else summed(part.T @ part)
        diagonal = gram.trace() / len(columns)
        scale = ridge * torch.maximum(diagonal, _VARIES * squares[columns].mean())
        gram.diagonal().add_(scale)
        side = residual[:, outputs]
        solution, info = torch.linalg.solve_ex(gram, side if few else summed(part.T @ side))
        if int(info) or not solution.isfinite().all():
            raise _singular(name, len(columns))
        weight[outputs[:, None], columns] = (part.T @ solution if few else solution).T
    return Correction(weight, means[1] - weight @ means[0])


def _singular(name: str, columns: int) -> InputError:
    return InputError(
        f"The least squares of {name!r} have no unique solution: its {columns} inputs are linearly dependent on these "
        "batches. Pass `ridge` > 0, or more samples."
    )


def _patterns(support: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs with the same support, and the columns of the support."""
    distinct, kinds = support.unique(dim=0, return_inverse=True)
    for kind, pattern in enumerate(distinct):
        columns = pattern.nonzero()[:, 0]
        if len(columns):
            yield (kinds == kind).nonzero()[:, 0], columns


def squared_error(rows: Tensor, residual: Tensor, change: Correction) -> float:
    """Return the sum of squares of the residual after a correction."""
    return float((residual - rows @ change.weight.T - change.shift).square().sum())
