"""Norms as functions, over channels some of which are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.surgery.full_width import FullGroups, FullWidth, modules_with, norms_over

GENERATOR = torch.Generator().manual_seed(0)


def noise(*shape: int) -> Tensor:
    """Random numbers, always others."""
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
@pytest.mark.parametrize("fill", [None, noise(3)])
def test_over_the_last_dimension(norm: Any, fill: Tensor | None) -> None:
    """The channels that are left get what they got beside the others."""
    x, weight = noise(2, 4, 5), noise(5)
    gone = torch.zeros(3, dtype=torch.float64) if fill is None else fill
    wide = torch.cat([x, gone.expand(2, 4, 3)], -1)
    expected = norm(wide, (8,), torch.cat([weight, noise(3)]))[..., :5]
    own = getattr(norms_over(8, fill is not None), norm.__name__)
    torch.testing.assert_close(own(x, FullWidth.of(5, 8, fill), weight), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fill", [None, noise(4)])
def test_over_groups(fill: Tensor | None) -> None:
    """Each group lost as many."""
    x, weight, bias = noise(2, 2, 3, 7), noise(6), noise(6)
    gone = torch.zeros(4, dtype=torch.float64) if fill is None else fill
    wide = torch.cat([x, gone.view(1, 2, 2, 1).expand(2, 2, 2, 7)], 2).flatten(1, 2)
    full = [torch.cat([p.view(2, 3), noise(2, 2)], 1).flatten() for p in (weight, bias)]
    expected = F.group_norm(wide, 2, *full).unflatten(1, (2, 5))[:, :, :3].flatten(1, 2)
    groups: Any = 2 if fill is None else FullGroups.of(2, fill)
    own = norms_over(10, fill is not None).group_norm(x.flatten(1, 2), groups, weight, bias)
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


def test_what_stands_for_the_modules_of_torch() -> None:
    """Each way to the functions leads to the other ones, and everything else is torch's own."""
    functional = norms_over(8, False)
    modules = modules_with(functional)
    assert modules[torch].nn is modules[nn] and modules[nn].functional is modules[F] is functional
    assert modules[torch].Tensor is Tensor and modules[nn].Linear is nn.Linear and functional.relu is F.relu
    assert torch.nn.functional is F
