"""A plan applied parameter by parameter; two processes are in tests/lightning_compress/test_sharded.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.compaction import sharded
from engine.compaction.plan import Plan
from engine.compaction.sharded import ShardedCompaction
from engine.compaction.slices import Slice
from engine.errors import PlanError


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A net with an optimizer that has made a step, and masked channels."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in (*net[0].parameters(), *net[1].parameters()):
            parameter[1::2] = 0
    return net.eval(), optimizer


def plan_of(net: nn.Module) -> Plan:
    """What is zero goes."""
    return engine.ModelSpeedup(net, torch.ones(2, 1, 5, 5), confidence=0).plan


def test_as_in_a_plain_model() -> None:
    """Weights, buffers, attributes, states and gradients are those that `Plan.apply` leaves."""
    (one, first), (other, second) = trained(), trained()
    plan = plan_of(one)
    change = ShardedCompaction(plan, one, [first])
    change.commit()
    change.close()
    plan.apply(other, second)
    assert str(one) == str(other)
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad) and first.state[a].keys() == second.state[b].keys()
        assert all(torch.equal(first.state[a][key], second.state[b][key]) for key in first.state[a])


def test_rollback() -> None:
    """Everything is as it was, objects included."""
    net, optimizer = trained()
    before = {name: (tensor, tensor.clone()) for name, tensor in (*net.named_parameters(), *net.named_buffers())}
    text, states = str(net), [dict(state) for state in optimizer.state.values()]
    change = ShardedCompaction(plan_of(net), net, [optimizer])
    change.commit()
    assert str(net) != text and net[0].weight is before["0.weight"][0]
    change.rollback()
    after = dict((*net.named_parameters(), *net.named_buffers()))
    assert str(net) == text and all(after[n] is t and torch.equal(t, v) for n, (t, v) in before.items())
    assert [dict(state) for state in optimizer.state.values()] == states


def test_refusals_change_nothing() -> None:
    """Infinities under a mask, optimizers that look at a parameter as a whole, and plans of other models."""
    net, _ = trained()
    plan = plan_of(net)
    with torch.no_grad():
        net[3].weight[0, 0] = torch.inf
    with pytest.raises(PlanError, match="'3.weight' contains infinities"):
        ShardedCompaction(plan, net)
    net, _ = trained()
    state = torch.optim.SGD(net.parameters(), momentum=0.9)
    state.state[net[0].weight]["odd"] = torch.ones(3)
    with pytest.raises(PlanError, match="SGD keeps 'odd'"):
        ShardedCompaction(plan, net, [state])
    with pytest.raises(PlanError, match="no parameter or buffer 'other'"):
        ShardedCompaction(Plan({"other": Slice.along(0, torch.tensor([0]), (2,))}), net)
    assert net[0].weight.shape == (4, 1, 3, 3)


def test_parts_of_tensor_parallelism_stay_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be split evenly is an error that names the parameter; what can, or is not cut, is none."""
    monkeypatch.setattr(sharded, "parts", lambda parameter, owners: {0: 2} if parameter.ndim == 4 else {})
    net, _ = trained()
    plan = plan_of(net)
    ShardedCompaction(plan, net).close()
    with torch.no_grad():
        for parameter in (*net[0].parameters(), *net[1].parameters()):
            parameter[3] = 1
    odd = plan_of(net)
    with pytest.raises(PlanError, match="3 of 4 channels remain along dimension 0 of '0.weight'.*round_to"):
        ShardedCompaction(odd, net)
    assert net[0].weight.shape == (4, 1, 3, 3)
