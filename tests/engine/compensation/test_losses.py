"""What is lost with a unit, beside a least squares that leaves it out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.errors import InputError
from tests.engine.compensation.test_compensate import NETS
from tests.engine.exactness import randomised


@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_residual_of_the_least_squares_without_the_unit(groups: int) -> None:
    """By brute force, for a convolution with a bias, with groups too."""
    torch.manual_seed(0)
    net = randomised(nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 2, groups=groups)))
    x = torch.randn(128, 2, 4, 4, dtype=torch.float64)
    [group, _] = engine.dependency_groups(net, x[:2])
    losses = engine.reconstruction_losses(net, x[:2], [group], [x], samples=128, ridge=0.0)["0"]
    with torch.no_grad():
        hidden = net[1](net[0](x))
        columns = F.unfold(hidden, 2).transpose(1, 2).reshape(-1, 4, 4)  # (rows, channels, kernel)
        out = net[2](hidden).movedim(1, -1).flatten(0, -2)
    out = out - out.mean(0)
    for unit in range(4):
        error = 0.0
        for g in range(groups):
            inputs = [i for i in range(4 * g // groups, 4 * (g + 1) // groups) if i != unit]
            target = out[:, 2 * g // groups : 2 * (g + 1) // groups]
            if unit * groups // 4 != g:
                continue
            rows = columns[:, inputs].flatten(1)
            rows = rows - rows.mean(0)
            error += float((target - rows @ torch.linalg.lstsq(rows, target).solution).square().sum())
        assert losses[unit].item() == pytest.approx(error / float(out.square().sum()), rel=1e-5)


def test_a_unit_that_repeats_another_costs_nothing() -> None:
    """It goes first, whatever its weights are; small weights alone are no reason."""
    torch.manual_seed(0)
    net = randomised(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)))
    with torch.no_grad():
        net[0].weight[4], net[0].bias[4] = 3 * net[0].weight[1], 3 * net[0].bias[1]
    x = torch.randn(256, 3, dtype=torch.float64)
    losses = engine.reconstruction_losses(net, x[:1], engine.dependency_groups(net, x[:1]), [x], ridge=1e-9)["0"]
    assert set(losses.argsort()[:2].tolist()) == {1, 4} and losses[1] < 1e-4 * losses.median()


@pytest.mark.parametrize("name", NETS)
def test_each_group_that_can_go_has_losses(name: str) -> None:
    """Of all layers that compensation can fit; nothing of the model changes."""
    make, shape = NETS[name]
    torch.manual_seed(0)
    model = randomised(make())
    example = torch.randn(2, *shape, dtype=torch.float64)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    groups = engine.dependency_groups(model, example)
    losses = engine.reconstruction_losses(model, example, groups, [torch.randn(32, *shape, dtype=torch.float64)])
    for group in groups:
        if group.reason is None:
            scores = losses[group.name]
            assert scores.shape == (group.size,) and scores.isfinite().all() and (scores > 0).any()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class _Joined(nn.Module):
    """Behind a flattening, each channel is read at four positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 4, 1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().flatten(1))


def test_units_of_several_positions() -> None:
    """One loss per channel."""
    net = randomised(_Joined())
    x = torch.randn(64, 2, 2, 2, dtype=torch.float64)
    losses = engine.reconstruction_losses(net, x[:1], engine.dependency_groups(net, x[:1]), [x])
    assert losses["conv"].shape == (4,) and (losses["conv"] > 0).all()


def test_bad_batches_are_refused() -> None:
    """As `compensate` refuses them."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(InputError, match="NaN"):
        engine.reconstruction_losses(net, torch.zeros(1, 3), [], [torch.full((4, 3), torch.nan)])
