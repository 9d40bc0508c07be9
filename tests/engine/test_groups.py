"""Dependency groups as users see them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import InputError
from tests.engine.exactness import check_exact, randomised
from tests.engine.language import Language, sentence
from tests.engine.nets import Net, image, plain, residual_net


def by_name(model: nn.Module, example: Tensor | None = None) -> dict[str, engine.Group]:
    """Groups by name."""
    return {g.name: g for g in engine.dependency_groups(model, image() if example is None else example)}


def test_members_and_their_roles() -> None:
    """Who puts a unit out, which norms follow, who reads it."""
    groups = by_name(plain())
    assert list(groups) == ["0", "3", "7"]
    assert [(m.role, m.parameter) for m in groups["0"].members] == [
        ("out", "0.weight"),
        ("out", "0.bias"),
        ("norm", "1.weight"),
        ("norm", "1.bias"),
        ("in", "3.weight"),
    ]
    assert groups["0"].size == 6 and groups["0"].layers == ("0",) and groups["0"].reason is None
    assert "output of the model" in groups["7"].reason and "frozen" in str(groups["7"])


def test_units_say_which_entry_belongs_to_which_unit() -> None:
    """Zeroing the entries of one unit in every member that puts it out makes exactly that channel zero."""
    model = residual_net()
    group = by_name(model)["stem"]
    assert group.layers == ("stem", "branch") and group.size == 6
    for unit in range(group.size):
        changed = copy.deepcopy(model)
        for member in group.members:
            assert tuple(torch.broadcast_shapes(member.units.shape, member.shape)) == member.shape
            if member.role != "in":
                with torch.no_grad():
                    changed.get_parameter(member.parameter)[(member.units == unit).expand(member.shape)] = 0
        seen: list[Tensor] = []
        changed.head.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].detach()))
        changed(image())
        zero = (seen[0] == 0).all(0).nonzero()[:, 0].tolist()
        assert len(zero) == 1


def test_a_layer_that_feeds_several_groups() -> None:
    """A cut through its channels makes two groups, told apart by a number."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x.mean((2, 3))) + m.other(x[:, : x.shape[1] // 2].mean((2, 3)))

    model = Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2), other=nn.Linear(4, 2)).double()
    groups = by_name(model)
    assert [g for g in groups if g.startswith("stem")] == ["stem", "stem#2"]
    assert groups["stem"].size == groups["stem#2"].size == 4
    units = groups["stem"].members[0].units
    assert (units >= 0).sum() == 4 and (units == -1).sum() == 4


def test_rows_must_go_in_equal_numbers() -> None:
    """Groups of a convolution are rows of one dependency group."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1, groups=2), nn.Conv2d(6, 2, 1)).double()
    groups = by_name(model)
    assert len(groups["0"].rows.unique()) == 2 and len(groups["1"].rows.unique()) == 2
    assert len(by_name(plain())["0"].rows.unique()) == 1


def test_the_order_is_by_first_use_and_the_same_every_time() -> None:
    """Deterministic names, units and members."""
    model = residual_net()
    first, second = (engine.dependency_groups(model, image()) for _ in range(2))
    assert [str(g) for g in first] == [str(g) for g in second]
    assert all(torch.equal(a.slots, b.slots) for a, b in zip(first, second, strict=True))


def test_group_masks_close_whole_units() -> None:
    """Masks over every parameter that puts a unit out compact exactly and leave nothing to fold."""
    model = plain()
    groups = engine.dependency_groups(model, image())
    masks = engine.group_masks(groups, {"0": torch.tensor([1, 0, 1, 1, 0, 1]).bool()})
    assert set(masks) == {"0", "1"} and masks["0"]["weight"].shape == model[0].weight.shape
    plan = check_exact(model, masks, image(), image(9))
    assert plan.slices["0.weight"].shape[0] == 4 and plan.folds == ()


def test_two_groups_in_one_parameter() -> None:
    """Their masks multiply."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x.mean((2, 3))) + m.other(x[:, : x.shape[1] // 2].mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2), other=nn.Linear(4, 2)))
    groups = engine.dependency_groups(model, image())
    keep = {"stem": torch.tensor([0, 1, 1, 1]).bool(), "stem#2": torch.tensor([1, 1, 1, 0]).bool()}
    masks = engine.group_masks(groups, keep)
    assert masks["stem"]["bias"].tolist() == [0, 1, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(("name", "size"), [("nothing", 6), ("0", 5)])
def test_unknown_groups_and_wrong_lengths_are_refused(name: str, size: int) -> None:
    """With the name, and what there is."""
    groups = engine.dependency_groups(plain(), image())
    with pytest.raises(InputError, match=rf"'{name}' with shape \({size},\); (the groups are 0, 3, 7|it has 6 units)"):
        engine.group_masks(groups, {name: torch.ones(size, dtype=torch.bool)})


def test_no_group_masks_no_masks() -> None:
    """Groups that are not named stay whole."""
    assert engine.group_masks(engine.dependency_groups(plain(), image()), {}) == {}


def test_an_embedding_puts_channels_out() -> None:
    """Its columns are the units of a group, also where the last layer shares the table."""
    for tied in (False, True):
        model = Language()
        if tied:
            model.head.weight = model.embed.weight
        group = engine.dependency_groups(model, sentence())[0]
        assert group.layers[0] == "embed" and group.size == 16 and group.reason is None
        masks = engine.group_masks([group], {"embed": torch.arange(16) < 9})
        assert masks["embed"]["weight"].shape == (11, 16) and not masks["embed"]["weight"][:, 9:].any()
        assert any("embed" in names for names in engine.ChannelDependency(model, sentence()).dependency_sets)


def test_what_is_no_mask_of_units() -> None:
    """Nothing, and numbers between 0 and 1 or NaN, of which a float mask would keep a part."""
    groups = engine.dependency_groups(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)), torch.zeros(1, 1, 2, 2))
    for entry in (0.5, float("nan")):
        with pytest.raises(InputError, match="`keep` of the group '0' has entries other than 0 and 1"):
            engine.group_masks(groups, {"0": torch.tensor([1.0, entry])})
    with pytest.raises(InputError, match="`keep` must be a mapping, got None"):
        engine.group_masks(groups, None)  # type: ignore[arg-type]
