"""Eval mode for the length of a block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.recording.evaluation import evaluating
from tests.engine.nets import plain


def test_it_restores_after_an_error() -> None:
    """Whatever the body raises."""
    model = plain().train()
    with pytest.raises(KeyError), evaluating(model):
        assert not model.training
        model.register_buffer("new", torch.ones(1))
        del model[0].weight
        raise KeyError
    assert all(m.training for m in model.modules())
    assert "new" not in model._buffers and isinstance(model[0].weight, nn.Parameter)


def test_it_keeps_what_the_modes_need() -> None:
    """Named modules are in train mode inside, the rest is not."""
    model = plain()
    with evaluating(model, [model[0]]):
        assert model[0].training and not model[1].training
    assert not model[0].training


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_get_their_memory_back(device: str) -> None:
    """A forward may put other memory under a parameter, of another dtype even."""
    model = plain().to(device)
    weight, mean = model[0].weight, model[1].running_mean
    before = [t.data for t in (weight, mean)]
    places = [t.untyped_storage()._cdata for t in before]
    with evaluating(model):
        weight.data, mean.data = torch.zeros(3, 3, device=device), mean.data.float()
    assert model[0].weight is weight and weight.requires_grad and weight.dtype == torch.float64
    assert [t.untyped_storage()._cdata for t in (weight, mean)] == places
    assert [t.shape for t in (weight, mean)] == [t.shape for t in before]
