r"""Ridge regression toward the present weights.

With rows :math:`\varphi` of what a weight is multiplied with, and the residual :math:`R = T - \varphi W - b` of the
target, the change that is made is

.. math:: \Delta = (\varphi^\top \varphi + \lambda I)^{-1} \varphi^\top R, \qquad
          \lambda = \mathrm{ridge} \cdot \operatorname{mean} \operatorname{diag} \varphi^\top \varphi

Where a shift takes up the means, :math:`\varphi` and :math:`R` are centred. Inputs that do not vary on the samples then
leave nothing but rounding, so their mean diagonal counts as :math:`10^{-9}` of what it is before centring, at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.compensation.weights import Alone
from engine.errors import InputError

__all__ = ["Correction", "correction", "squared_error"]

_ALONE = Alone()
_VARIES = 1e-9  # of the mean square of the inputs: less than this is rounding


@dataclass(frozen=True, eq=False)
class Correction:
    """What is added to a weight and to its bias.

    Attributes:
        weight: float64, (outputs, columns).
        shift: float64, (outputs,).
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
    summed: Callable[[Tensor], Tensor] = _ALONE.summed,
) -> Correction:
    """Return the change of a weight that brings its output closest to a target.

    Args:
        rows: float64, (rows, columns).
        residual: target minus the present output of the weight, float64, (rows, outputs).
        support: which entries may change, bool, (outputs, columns).
        ridge: weight of the penalty on the change, relative to the mean diagonal of the Gram matrix.
        shifts: whether there is a bias, or something in its place, that takes up a shift.
        name: of the layer, for the error.
        summed: sums a tensor over processes that hold other rows of the same system.

    Raises:
        InputError: where the system is singular, which only ``ridge=0`` allows.

    Example:
        >>> rows = torch.eye(3, dtype=torch.float64)
        >>> change = correction(rows, rows @ torch.ones(3, 2).double(), torch.ones(2, 3) > 0, 0.0, False, "layer")
        >>> bool(torch.allclose(change.weight, torch.ones(2, 3).double()))
        True
    """
    means = [side.new_zeros(side.size(1)) for side in (rows, residual)]
    if shifts:
        count = summed(rows.new_tensor(len(rows)))
        means = [summed(side.sum(0)) / count for side in (rows, residual)]
    squares = summed(rows.square().sum(0))
    rows, residual = rows - means[0], residual - means[1]
    gram, cross = summed(rows.T @ rows), summed(rows.T @ residual)
    weight = rows.new_zeros(residual.size(1), rows.size(1))
    for outputs, columns in _patterns(support):
        if ridge and not squares[columns].any():
            continue  # these inputs are zero on all samples, which say nothing about their weights
        part = gram[columns][:, columns]
        scale = torch.maximum(part.diagonal().mean(), _VARIES * squares[columns].mean())
        part = part + torch.eye(len(columns), dtype=part.dtype, device=part.device) * (ridge * scale)
        solution, info = torch.linalg.solve_ex(part, cross[columns][:, outputs])
        if int(info) or not solution.isfinite().all():
            raise InputError(
                f"The least squares of {name!r} have no unique solution: on these batches its {len(columns)} inputs "
                "depend on each other. Pass a `ridge` above 0, or more samples."
            )
        weight[outputs[:, None], columns] = solution.T
    return Correction(weight, means[1] - weight @ means[0])


def _patterns(support: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs that may change the same entries, and these entries."""
    distinct, kinds = support.unique(dim=0, return_inverse=True)
    for kind, pattern in enumerate(distinct):
        columns = pattern.nonzero()[:, 0]
        if len(columns):
            yield (kinds == kind).nonzero()[:, 0], columns


def squared_error(rows: Tensor, residual: Tensor, change: Correction) -> float:
    """Return the sum of squares of what is left of a residual."""
    return float((residual - rows @ change.weight.T - change.shift).square().sum())
