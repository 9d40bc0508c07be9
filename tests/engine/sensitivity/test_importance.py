"""Which channels weigh least, and masks that remove them for a while."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

import engine
from engine.errors import InputError
from engine.sensitivity.importance import CRITERIA, cut, l1, l2, level_mask, mask_groups, mask_layer, masked, unit_rows


@pytest.mark.parametrize("name", CRITERIA)
def test_criteria_are_their_formulas(name: str) -> None:
    """Each against its definition, one channel at a time."""
    rows = torch.randn(40, 7)
    formulas = {
        "l1": lambda u: sum(abs(float(w)) for w in rows[u]),
        "l2": lambda u: sum(float(w) ** 2 for w in rows[u]) ** 0.5,
        "fpgm": lambda u: sum(float((rows[u] - row).norm()) for row in rows),
    }
    expected = torch.tensor([formulas[name](u) for u in range(40)])
    assert torch.allclose(CRITERIA[name](rows), expected, rtol=1e-3)


def test_cut_counts_down_and_keeps_one() -> None:
    """The floor of what was meant, of equal scores the first; never all."""
    assert int(cut(torch.rand(100), 0.29).sum()) == 71
    assert cut(torch.zeros(4), 0.5).tolist() == [False, False, True, True]
    assert cut(torch.rand(3), 1.0).sum() == 1


def test_cut_takes_as_many_from_each_row() -> None:
    """Though one row has all the low scores."""
    rows = torch.tensor([0, 0, 0, 1, 1, 1])
    assert cut(torch.arange(6.0), 0.4, rows).tolist() == [False, True, True, False, True, True]


def test_level_counts_entries() -> None:
    """The smallest magnitudes over the whole weight."""
    weight = torch.randn(5, 4, 3, 3)
    keep = level_mask(weight, 0.3)
    assert int((~keep).sum()) == 54 and weight[~keep].abs().max() <= weight[keep].abs().min()


def coupled() -> nn.Module:
    """A stem and a branch that are added, with a norm."""

    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch, self.norm = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.head = nn.Conv2d(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(self.norm(x + self.branch(x)))

    return Add()


def test_rows_of_a_group_hold_all_its_layers() -> None:
    """The weights of stem and branch that put a channel out, side by side."""
    net = coupled()
    group = engine.dependency_groups(net, torch.zeros(1, 2, 4, 4))[0]
    rows = unit_rows(group, net.get_parameter)
    assert torch.equal(rows, torch.cat([net.stem.weight.flatten(1), net.branch.weight.flatten(1)], 1))


def test_rows_where_a_unit_has_several_outputs() -> None:
    """Channels that a reshape ties have all their weights in one row."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(3, 8), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.fc(x).view(x.shape[0], 2, 4).sum(1))

    net = Heads()
    group = engine.dependency_groups(net, torch.zeros(1, 3))[0]
    rows = unit_rows(group, net.get_parameter)
    assert group.size == 4
    assert torch.allclose(l1(rows), net.fc.weight.abs().sum(1).view(2, 4).sum(0))


def test_group_masks_reach_every_parameter_that_puts_a_unit_out() -> None:
    """Weights and biases of both layers, and the norm; never a consumer's columns."""
    net = coupled()
    masks = mask_groups(engine.dependency_groups(net, torch.zeros(1, 2, 4, 4))[:1], net, l2)(0.5)
    assert sorted(masks) == ["branch.bias", "branch.weight", "norm.bias", "norm.weight", "stem.bias", "stem.weight"]
    assert all(mask.flatten(1).any(1).sum() == 3 if mask.ndim > 1 else mask.sum() == 3 for mask in masks.values())


@pytest.mark.parametrize("groups", [1, 2])
def test_outputs_of_a_transposed_convolution(groups: int) -> None:
    """Its weight has the inputs first; the masked output is zero everywhere, the others are as before."""
    net = nn.ConvTranspose2d(4, 6, 2, groups=groups)
    x = torch.rand(1, 4, 3, 3)
    before = net(x)
    masks = mask_layer(net, "", l1)(0.5)
    with masked(net, masks):
        dead = (net(x) == 0).flatten(2).all(2)[0]
        assert torch.equal(net(x)[:, ~dead], before[:, ~dead])
    assert int(dead.sum()) == 3 and torch.equal(net(x), before)


def test_masked_restores_everything() -> None:
    """Also where the body raises, trains the norm, or leaves another mode: NaN and negative zero included."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([float("nan"), -0.0]).view(2, 1, 1, 1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(KeyError), masked(net, {"0.weight": torch.zeros(2, 1, 1, 1)}):
        assert not net[0].weight.any()
        net.train()(torch.rand(2, 1, 2, 2))
        net.eval()
        raise KeyError
    assert net.training
    for name, value in net.state_dict().items():
        assert value.numpy().tobytes() == before[name].numpy().tobytes()


@pytest.mark.parametrize("change", ["half", "move", "replace", "fuse"])
def test_masked_restores_what_is_exchanged(change: str) -> None:
    """Another precision or device, another parameter, another layer: the same objects with the same bits again."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored = [*model.modules(), *model.parameters(), *model.buffers()]
    with masked(model, {"0.weight": torch.tensor([1.0, 0.0, 1.0, 0.0])[:, None, None, None]}):
        if change == "half":
            model.half()
        elif change == "move":
            model.to("meta")
        elif change == "replace":
            model[0].weight = nn.Parameter(model[0].weight * 2)
        else:
            model[0], model[1] = fuse_conv_bn_eval(model[0], model[1]), nn.Identity()
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(a is b for a, b in zip(stored, [*model.modules(), *model.parameters(), *model.buffers()], strict=True))


def test_a_lazy_layer_is_refused() -> None:
    """It has no weight to score yet."""
    with pytest.raises(InputError, match="'0' has no weight yet"):
        mask_layer(nn.Sequential(nn.LazyLinear(3)), "0", l1)
