"""What a model is made of."""

from __future__ import annotations

import pytest
import torch

from lightning_compress.report.survey import Survey, survey
from tests.lightning_compress.models import Net

X = torch.ones(1, 3, 8, 8)


def test_layers_have_the_costs_of_the_counter() -> None:
    """By first use; the sums are the model's."""
    net = Net()
    found = survey(net, X)
    assert [(layer.name, layer.kind, layer.channels) for layer in found.layers] == [
        ("stem", "Conv2d", 8),
        ("wide", "Conv2d", 16),
        ("back", "Conv2d", 8),
        ("fc", "Linear", 3),
    ]
    assert sum(layer.macs for layer in found.layers) == found.macs
    assert found.params == sum(p.numel() for p in net.parameters())
    assert found.size == sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))


def test_axes_say_what_masks_keep_and_why_some_stay() -> None:
    """The residual sum couples; the output cannot go."""
    net = Net()
    masks = {"stem": {"weight": torch.ones(8, 3, 3, 3)}, "back": {"weight": torch.ones(8, 16, 3, 3)}}
    for own in masks.values():
        own["weight"][:3] = 0
    axes = {axis.name: axis for axis in survey(net, X, masks).axes}
    assert axes["stem"].layers == ("stem", "back") and (axes["stem"].kept, axes["stem"].size) == (5, 8)
    assert axes["fc"].reason == "is an output of the model"


def test_it_is_stored_as_primitives(tmp_path: pytest.TempPathFactory) -> None:
    """Readable with weights_only, and equal afterwards."""
    found = survey(Net(), X)
    torch.save(found.state_dict(), f"{tmp_path}/survey.pt")
    assert Survey.from_state_dict(torch.load(f"{tmp_path}/survey.pt", weights_only=True)) == found
