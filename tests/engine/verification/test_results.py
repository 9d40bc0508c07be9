"""What a call gives is compared, in whatever object it lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.verification.certify import Observation
from engine.verification.comparison import compare
from engine.verification.results import attributes, results_of
from engine.verification.witness import Witness


class Keeps(nn.Module):
    """Leaves an attribute, and returns a namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), 0.5

    def forward(self, x: Tensor) -> Any:
        """Leave a tensor and a parameter, return another tensor."""
        self.last, self.again = {"h": self.layer(x)}, self.layer.weight
        return SimpleNamespace(y=x + 1)


def test_returned_and_kept() -> None:
    """In this order; a parameter under another name is no result."""
    net, x = Keeps(), torch.ones(1, 2)
    before = attributes(net)
    found = results_of(net(x), net, before)
    assert [t.tolist() for t in found] == [(x + 1).tolist(), net.layer(x).tolist()]


def test_another_number_of_results_is_another_path() -> None:
    """Masked and compacted model have to leave the same."""
    one, other = (Observation.of((), reference=True) for _ in range(2))
    one.outputs, other.outputs = [torch.ones(2)], [torch.ones(2), torch.ones(2)]
    with pytest.raises(Exception, match="another path"):
        compare(one, other, Witness((), (), (), ()), 1e-9)
