"""What the label rules write to."""

from __future__ import annotations

import torch
from torch import nn

import engine
from engine.analysis.labels import Labels, is_made_of


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
