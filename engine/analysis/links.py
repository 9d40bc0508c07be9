"""The nonzero pattern of a contraction's weight: which inputs are linked to which outputs.

Masks of whole channels make this pattern constant along outputs or inputs. It is stored and evaluated in compact form,
so that its cost does not grow with the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.program.contraction import Contraction

__all__ = ["Links"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Links:
    """The nonzero pattern of a weight.

    Attributes:
        pattern: bool, (groups, outputs, inputs), of size 1 along dimensions that it does not depend on.
        shape: (groups, outputs per group, inputs per group).

    Example:
        >>> links = Links(torch.tensor([[[True], [False]]]), (1, 2, 3))
        >>> links.reached(np.array([[False, True, False]])).tolist()
        [[True, False]]
        >>> links.feeding(np.array([[False, True]])).tolist()
        [[False, False, False]]
    """

    pattern: Tensor
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, c: Contraction, nonzero: Tensor) -> Links:
        """Build the pattern from a compact bool array in the weight's layout."""
        for _ in range(c.stacked):
            nonzero = nonzero.any(0)
        if nonzero.ndim > 2:  # the maximum of a kernel's bytes takes half the time of any()
            kernel = nonzero.flatten(2)
            nonzero = kernel[..., 0] if kernel.size(-1) == 1 else kernel.view(torch.uint8).amax(-1).bool()
        return cls(c.compact(nonzero), (c.groups, c.outputs, c.inputs))

    def reached(self, inputs: Bools) -> Bools:
        """Return which outputs have a link to any of the inputs: (groups, outputs) from (groups, inputs)."""
        return _full(_any(self.pattern.numpy(), inputs[:, None, :], 2), self.shape[:2])

    def feeding(self, outputs: Bools) -> Bools:
        """Return which inputs have a link to any of the outputs: (groups, inputs) from (groups, outputs)."""
        return _full(_any(self.pattern.numpy(), outputs[:, :, None], 1), self.shape[::2])

    def outputs(self) -> Tensor:
        """Return which outputs have any link: bool, (groups, outputs)."""
        return self.pattern.any(2).expand(self.shape[:2])

    def dense(self) -> Tensor:
        """Return the expanded pattern: bool, (groups, outputs, inputs)."""
        return self.pattern.expand(self.shape)


def _full(pattern: Bools, shape: tuple[int, ...]) -> Bools:
    """Expand where the pattern is constant along a dimension."""
    return pattern if pattern.shape == shape else np.array(np.broadcast_to(pattern, shape))


def _any(pattern: Bools, row: Bools, dim: int) -> Bools:
    """``(pattern & row).any(dim)``, without the outer product where the pattern is constant along ``dim``."""
    if pattern.shape[dim] == 1:
        return pattern.squeeze(dim) & row.any(dim)
    return np.asarray((pattern & row).any(dim))
