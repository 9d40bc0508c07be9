"""Which inputs of a contraction have a weight that is not zero on which outputs.

Masks of whole channels make this pattern the same along outputs or inputs; it is kept, and computed with, in that
compact form, so that its cost does not grow with the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contraction import Contraction

__all__ = ["Links"]


@dataclass(frozen=True, eq=False)
class Links:
    """The non-zero pattern of a weight.

    Attributes:
        pattern: bool, (groups, outputs, inputs) or of size 1 along what it does not depend on.
        shape: (groups, outputs per group, inputs per group).

    Example:
        >>> import torch
        >>> links = Links(torch.tensor([[[True], [False]]]), (1, 2, 3))
        >>> links.reached(torch.tensor([[False, True, False]])).tolist()
        [[True, False]]
        >>> links.feeding(torch.tensor([[False, True]])).tolist()
        [[False, False, False]]
    """

    pattern: Tensor
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, c: Contraction, nonzero: Tensor) -> Links:
        """Read the pattern off a compact bool array in the weight's layout."""
        if nonzero.ndim > 2:  # the largest byte of a kernel is found twice as fast as any true one
            kernel = nonzero.flatten(2)
            nonzero = kernel[..., 0] if kernel.size(-1) == 1 else kernel.view(torch.uint8).amax(-1).bool()
        return cls(c.compact(nonzero), (c.groups, c.outputs, c.inputs))

    def reached(self, inputs: Tensor) -> Tensor:
        """Return which outputs have a link to any of the inputs: bool, (groups, outputs) from (groups, inputs)."""
        return _any(self.pattern, inputs.unsqueeze(1), 2).expand(self.shape[:2])

    def feeding(self, outputs: Tensor) -> Tensor:
        """Return which inputs have a link to any of the outputs: bool, (groups, inputs) from (groups, outputs)."""
        return _any(self.pattern, outputs.unsqueeze(2), 1).expand(self.shape[0], self.shape[2])

    def outputs(self) -> Tensor:
        """Return which outputs have a link at all: bool, (groups, outputs)."""
        return self.pattern.any(2).expand(self.shape[:2])

    def dense(self) -> Tensor:
        """Return the pattern in full: bool, (groups, outputs, inputs)."""
        return self.pattern.expand(self.shape)


def _any(pattern: Tensor, row: Tensor, dim: int) -> Tensor:
    """``(pattern & row).any(dim)``, without the outer product where the pattern is the same along ``dim``."""
    if pattern.size(dim) == 1:
        return pattern.squeeze(dim) & row.any(dim)
    return (pattern & row).any(dim)
