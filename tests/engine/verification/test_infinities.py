"""Masks with infinite entries among outputs, and in what a call leaves."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import VerificationError
from engine.verification.infinities import without_infinities
from tests.engine.exactness import masked, randomised, relative_error, run
from tests.engine.nets import dead

INF = torch.inf


@pytest.mark.parametrize(
    ("one", "other", "left"),
    [
        ([1.0, -INF], [2.0, -INF], 1),
        ([1.0, -INF], [2.0, INF], 2),
        ([1.0, -INF], [-INF, 2.0], 2),
        ([INF, INF], [INF, INF], 2),
        ([1.0, 2.0], [1.0, INF], 2),
    ],
)
def test_the_same_infinities_are_left_out(one: list[float], other: list[float], left: int) -> None:
    """Not others, and not all of them."""
    assert [len(t) for t in without_infinities(torch.tensor(one), torch.tensor(other))] == [left, left]


def test_not_a_number_stays() -> None:
    """It is seen as long as it is there."""
    one, _ = without_infinities(*[torch.tensor([1.0, -INF, torch.nan])] * 2)
    assert one[1].isnan()


class Actions(nn.Module):
    """Scores of actions, of which some are not allowed, with the mask that it keeps."""

    def __init__(self, allowed: int) -> None:
        super().__init__()
        self.stem, self.head, self.allowed = nn.Linear(3, 8), nn.Linear(8, 4), allowed
        self.mask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3) -> (N, 4)."""
        if self.mask is None:
            self.mask = torch.zeros(4, dtype=x.dtype).masked_fill(torch.arange(4) >= self.allowed, -math.inf)
        return self.head(torch.relu(self.stem(x))) + self.mask  # type: ignore[no-any-return]


def test_scores_of_actions_that_are_not_allowed() -> None:
    """The others are compared; where none is allowed, there is nothing to compare."""
    x = torch.randn(5, 3, dtype=torch.float64)
    model = randomised(Actions(3))
    masks = dead(model, {"stem": [0, 4]}, bias=True)
    reference, small = masked(model, masks), engine.ModelSpeedup(copy.deepcopy(model), x, masks).speedup_model()
    assert small.stem.weight.shape[0] == 6
    (one,), (other,) = run(reference, x), run(small, x)
    assert torch.equal(one[:, 3], other[:, 3]) and relative_error([one[:, :3]], [other[:, :3]]) <= 1e-9
    model = randomised(Actions(0))
    with pytest.raises(VerificationError, match="not finite"):
        engine.ModelSpeedup(model, x, dead(model, {"stem": [0]}, bias=True)).speedup_model()
