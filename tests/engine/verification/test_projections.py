"""Random projections of channels."""

from __future__ import annotations

import pytest
import torch

from engine.verification.projections import Directions, channel_norms


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((2, 5, 3, 3), 1), ((1, 5, 3, 3), 1), ((1, 5, 48, 48), 1), ((2, 3, 5), 2), ((4, 5), 1), ((5, 2, 3), 0)],
)
def test_projections_are_linear_and_as_large_as_channels(shape: tuple[int, ...], dim: int) -> None:
    """Whatever the channel dimension, batch size and number of entries: the mean square is the square of the norm."""
    directions, x = Directions(), torch.randn(shape, dtype=torch.float64)
    found = directions.project(x, dim)
    assert found.shape == (4, 5) and torch.allclose(directions.project(2 * x, dim), 2 * found)
    norms = channel_norms(x, dim)
    assert torch.allclose(norms, x.movedim(dim, 0).flatten(1).norm(dim=1))
    squares = torch.stack([(_fresh(seed).project(x, dim) ** 2).mean(0) for seed in range(200)]).mean(0)
    assert torch.allclose(squares, norms**2, rtol=0.3)


def _fresh(seed: int) -> Directions:
    """Directions of which the first ones were drawn for a tensor of another size."""
    directions = Directions()
    directions.project(torch.zeros(1, 1, 3000 + seed, dtype=torch.float64), 1)
    return directions


@pytest.mark.parametrize("place", [0, 700, 1500, 2303])
def test_a_difference_at_one_place_is_seen(place: int) -> None:
    """Also where projections share the places of a picture."""
    x = torch.randn(1, 2, 48, 48, dtype=torch.float64)
    other = x.clone()
    other.view(2, -1)[1, place] += 1e-3
    directions = Directions()
    difference = (directions.project(x, 1) - directions.project(other, 1)).abs().amax(0)
    assert difference[0] == 0 and difference[1] > 1e-7


def test_one_channel_has_one_direction_for_each_place() -> None:
    """Short directions are the beginnings of long ones: drawn once, whatever the order of later sizes."""
    one, other = Directions(), Directions()
    long, short = torch.randn(1, 2, 10).double(), torch.randn(1, 2, 4).double()
    one.project(long, 1)
    other.project(long, 1)
    other.project(torch.randn(1, 2, 7).double(), 1)
    assert torch.equal(one.project(short, 1), other.project(short, 1))
