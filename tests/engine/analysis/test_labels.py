"""What the label rules write to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.analysis.labels import Labels, is_made_of
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Net, image


def labels_of(model: nn.Module, *shape: int) -> Labels:
    """No rule has run yet."""
    return Labels(engine.trace(model, torch.zeros(*shape)))


def test_a_value_with_the_slots_of_another() -> None:
    """What is added to either is added to both, and it is stored where the other is."""
    labels = labels_of(nn.Linear(3, 2), 4, 3)
    weight, out = labels.graph.stored["weight"], labels.graph.outputs[0]
    labels.alias(out, weight)
    rows = labels.slots.new(2)
    labels.add(out, rows.view(2, 1)) if out.shape == (2, 3) else labels.add(weight, rows.view(2, 1))
    assert labels.layers(out) is labels.layers(weight)
    labels.claim(out)
    assert len(labels.layers(weight)) == 2


def test_rows_that_keep_equally_many_are_no_product() -> None:
    """A tensor made of such rows is left as it is; one made of others is tied until it is a product."""
    labels = labels_of(nn.GRU(3, 4, 2), 5, 2, 3)
    states = labels.graph.nodes[-1].outputs[1]
    for node in labels.graph.nodes:
        engine.RULES.rule(node.op).labels(node, labels)
    (rows,) = labels.layers(states)
    assert labels.is_ragged(rows) and not labels.is_ragged(rows[:, :, :2])
    assert not is_made_of({tuple(rows[0, 0].tolist())}, rows) and is_made_of({tuple(rows[0, 0].tolist())}, rows[:1])
    labels.make_rectangular()
    assert len(labels.slots.find(rows).unique()) == 8
    labels.ragged.clear()
    labels.make_rectangular()
    assert len(labels.slots.find(rows).unique()) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_read_in_other_groups_stays(kind: str) -> None:
    """Rows of a grouped layer see other channels where a function reads them without groups."""

    def forward(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.grouped(torch.relu(m.stem(x)))
        return m.head(torch.relu(y).mean((2, 3))), torch.conv2d(y, m.grouped.weight).mean((1, 2, 3))

    parts = {"stem": nn.Conv2d(3, 8, 1), "grouped": nn.Conv2d(8, 4, 1, groups=2), "head": nn.Linear(4, 2)}
    model = randomised(Net(forward, **parts))
    check_exact(model, KINDS[kind](model, 1), image(), image(8))
    masks = engine.fix_mask_conflict(KINDS[kind](model, 1), model, image())
    check_exact(model, masks, image(), image(8))
    reasons = [group.reason for group in engine.dependency_groups(model, image())]
    assert any("different numbers of groups" in reason for reason in reasons if reason)
