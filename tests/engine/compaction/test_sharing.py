"""Stored tensors that share memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import engine
from engine.compaction.sharing import sharing_of
from engine.errors import VerificationError


def _tied() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 5))
    net[2].weight.data = net[0].weight.data.t()
    return net


def _masks(rows: bool = True) -> dict[str, dict[str, torch.Tensor]]:
    stays = (torch.arange(8) > 3).float()
    mask = {"weight": stays[:, None].expand(8, 5), "bias": stays}
    return {"0": mask, "2": {"weight": stays.expand(5, 8)}} if rows else {"0": mask}


def test_only_what_overlaps_shares_memory() -> None:
    """Neighbours in one block do not; a view in an attribute does, the tensor itself does not."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    block = torch.zeros(8)
    net[0].weight.data, net[1].weight.data = block[:4].view(2, 2), block[4:].view(2, 2)
    net.own = [net[0].weight]
    assert not sharing_of(net)
    net.block = block
    assert [pair.names for pair in sharing_of(net)] == [("0.weight", "block"), ("1.weight", "block")]


def test_the_same_entries_share_memory_afterwards() -> None:
    """After a compaction, in a model that loads it, and where that grows back."""
    net, fresh = _tied(), engine.compactable(_tied())
    engine.ModelSpeedup(net, torch.zeros(2, 5), _masks()).speedup_model(training=True)
    state = copy.deepcopy(net.state_dict())
    fresh.load_state_dict(state)
    for model in (net, fresh):
        assert [pair.names for pair in sharing_of(model)] == [("0.weight", "2.weight")]
        assert torch.equal(model[2].weight, state["2.weight"]) and model[2].weight.shape == (5, 4)
    with pytest.warns(UserWarning, match="grows back"):
        fresh.load_state_dict(_tied().state_dict())
    assert sharing_of(fresh) and fresh[2].weight.shape == (5, 8)


def test_other_values_are_loaded_side_by_side() -> None:
    """What is folded into one of them does not reach the other."""
    net, fresh = _tied(), engine.compactable(_tied())
    engine.ModelSpeedup(net, torch.zeros(2, 5), _masks()).speedup_model()
    state = copy.deepcopy(net.state_dict())
    state["2.weight"] += 1
    fresh.load_state_dict(state)
    assert torch.equal(fresh[0].weight, state["0.weight"]) and torch.equal(fresh[2].weight, state["2.weight"])


def test_what_no_longer_shares_memory_is_refused_while_training() -> None:
    """With both names, and what to do."""
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    net[4].weight.data = net[0].weight.data.t()
    speedup = engine.ModelSpeedup(net, torch.zeros(2, 5), _masks(rows=False))
    with pytest.raises(VerificationError, match=r"'0.weight' and '4.weight' share memory.*one parameter"):
        speedup.speedup_model(training=True)
    speedup.speedup_model()
    assert not speedup.certificate.exact_in_train
