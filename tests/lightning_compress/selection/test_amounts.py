"""Tests of the selection of units."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress.selection import amounts as selection
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Net


@pytest.fixture(scope="module")
def groups() -> list[engine.Group]:
    """Groups `stem` (with `back`), `wide` and `fc` (the output)."""
    return engine.dependency_groups(Net(), torch.ones(1, 3, 8, 8))


def test_output_is_left_alone_by_default(groups: list[engine.Group]) -> None:
    """Without patterns all groups are chosen but the output layer's."""
    assert selection.amounts(groups, 0.5) == {"stem": 0.5, "wide": 0.5}


def test_patterns_choose_and_exclude(groups: list[engine.Group]) -> None:
    """A group is chosen by any of its layers, and excluded by any of them."""
    assert selection.amounts(groups, 0.5, layers=["wid*"]) == {"wide": 0.5}
    assert selection.amounts(groups, 0.5, layers=["back"]) == {"stem": 0.5}
    assert selection.amounts(groups, 0.5, exclude=["back"]) == {"wide": 0.5}


def test_amounts_by_pattern(groups: list[engine.Group]) -> None:
    """The first pattern that matches a layer decides; coupled layers get their smallest amount; the rest stays
    whole.
    """
    assert selection.amounts(groups, {"wide": 0.25, "*": 0.5}) == {"stem": 0.5, "wide": 0.25}
    assert selection.amounts(groups, {"stem": 0.75, "back": 0.25}) == {"stem": 0.25}


def test_pattern_that_matches_nothing_is_an_error(groups: list[engine.Group]) -> None:
    """The error names the pattern and the layers there are, be it for layers, exclude or amount."""
    for arguments in ({"layers": ["conv9*"]}, {"exclude": ["conv9*"]}):
        with pytest.raises(MisconfigurationException, match=r"'conv9\*' matches no layer.*stem.*wide"):
            selection.amounts(groups, 0.5, **arguments)
    with pytest.raises(MisconfigurationException, match="'typo'"):
        selection.amounts(groups, {"typo": 0.5})


def test_pattern_with_the_path_of_the_model(groups: list[engine.Group]) -> None:
    """Names inside of the LightningModule are a likely guess: what to write is said."""
    with pytest.raises(MisconfigurationException, match=r"relative to the pruned model: use 'ste\*'\. The model"):
        selection.check_patterns(groups, ["model.backbone.ste*"])
    with pytest.raises(MisconfigurationException, match=r"with channels\. The model"):
        selection.check_patterns(groups, ["model.nowhere*"])


def test_nothing_prunable_is_an_error(groups: list[engine.Group]) -> None:
    """Choosing only the output layer is an error that gives the engine's reason."""
    reason = next(group.reason for group in groups if "fc" in group.layers)
    with pytest.raises(MisconfigurationException, match="Nothing can be pruned in the layers.*fc: ") as error:
        selection.amounts(groups, 0.5, layers=["fc"])
    assert reason is not None and reason in str(error.value)


@pytest.mark.parametrize("amount", [-0.1, 1.1, float("nan"), "half", True, {"*": 2}])
def test_amount_outside_zero_and_one_is_an_error(amount: object) -> None:
    """The error names the amount."""
    with pytest.raises(MisconfigurationException, match=r"`amount` must be a fraction.*got"):
        selection.check_amount(amount)
    selection.check_amount(np.float32(0.5))


def test_kept_units_are_the_inverse_of_group_masks(groups: list[engine.Group]) -> None:
    """Masks made from kept units give these units back; groups without masks are kept."""
    keep = {"stem": torch.arange(8) % 3 > 0}
    kept = selection.kept_units(groups, engine.group_masks(groups, keep))
    assert torch.equal(kept["stem"], keep["stem"])
    assert kept["wide"].all()


def test_unit_is_kept_where_one_element_is(groups: list[engine.Group]) -> None:
    """A channel counts as masked only if all its weights in all coupled layers are."""
    weight = torch.zeros(8, 3, 3, 3)
    weight[2, 0, 1, 1] = 1
    masks = {"stem": {"weight": weight}, "back": {"weight": torch.zeros(8, 16, 3, 3)}}
    assert selection.kept_units(groups, masks)["stem"].nonzero().flatten().tolist() == [2]
    assert selection.kept_units(groups, {"stem": {"weight": weight}})["stem"].all()


def test_masks_of_prune_name_the_original_parameter() -> None:
    """Under torch.nn.utils.prune a mask of `weight` is that of the parameter `weight_orig`."""
    net = Net()
    nn.utils.prune.ln_structured(net.wide, "weight", 0.5, n=1, dim=0)
    groups = engine.dependency_groups(net, torch.ones(1, 3, 8, 8))
    kept = selection.kept_units(groups, engine.read_masks(net))
    assert int(kept["wide"].sum()) == 8


class Student(nn.Module):
    """A network, and one that only a step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.teacher = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.net(x)  # type: ignore[no-any-return]

    def step(self, x: Tensor) -> Tensor:
        """Return the distance from the teacher's scores."""
        return (self.net(x) - self.teacher(x)).square().mean()


def test_what_only_steps_read_stays_unless_it_is_named() -> None:
    """A catch-all amount names nothing."""
    model, x = Student(), torch.zeros(2, 3)
    graph = engine.trace(model, x, entries={"step": engine.Entry(model.step, (x,))})
    own = engine.dependency_groups(model, x, graph=graph)
    assert {group.name for group in own if group.reason is None} == {"net.0", "teacher.0"}
    everything: list[tuple[list[str], float | dict[str, float], set[str]]] = [
        ([], 0.5, {"net.0"}),
        ([], {"*": 0.5}, {"net.0"}),
        ([], {"teacher.*": 0.2, "*": 0.5}, {"net.0", "teacher.0"}),
        (["*"], 0.5, {"net.0", "teacher.0"}),
        (["teacher.0"], 0.5, {"net.0", "teacher.0"}),
    ]
    for layers, amount, free in everything:
        kept = selection.keep_what_steps_read_alone(own, graph, layers, amount)
        assert {group.name for group in kept if group.reason is None} == free
