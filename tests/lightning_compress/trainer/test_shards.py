"""What is asked of a sharded model, asked of a plain one; two processes are in test_sharded.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.compaction.plan import Plan
from engine.compaction.slices import Slice
from engine.errors import PlanError, TraceError, VerificationError
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.shards import Sharding, check_whole_units, shared_widths
from tests.lightning_compress.sharded_fit import Decoder


def net() -> nn.Module:
    """With a buffer that train mode writes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def test_outputs_are_those_of_eval_mode() -> None:
    """The same numbers each time, and no trace on the model."""
    model, example = net(), torch.zeros(5, 3).double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (Sharding(model).outputs(example, 2) for _ in range(2))
    assert len(first) == 2 and all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert model.training and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert Sharding(model).outputs(example, 0) == []


def test_integers_are_drawn_from_the_example() -> None:
    """A word that the embedding has."""
    model, example = nn.Embedding(9, 2), torch.tensor([[8, 0, 3]])
    outputs = Sharding(model).outputs(example, 1)
    assert sorted(outputs[0][0, :, 0].tolist()) == sorted(model(example)[0, :, 0].tolist())


def test_a_difference_is_an_error() -> None:
    """The certificate says what was compared; a model that computes anything else has none."""
    model, example = net(), torch.zeros(5, 3).double()
    sharding = Sharding(model)
    before = sharding.outputs(example, 2)
    verdict = sharding.compared(before, example, 2, engine.Certificate())
    assert verdict.verified and verdict.max_error == 0 and verdict.dtype == "float64" and "sharded" in str(verdict)
    with torch.no_grad():
        model[2].weight[0, 0] += 1e-6
    with pytest.raises(VerificationError, match="differ from those of the masked one"):
        sharding.compared(before, example, 2, engine.Certificate())


def test_digests() -> None:
    """Of names, classes and shapes, not of weights."""
    one, other = net(), net()
    with torch.no_grad():
        other[0].weight += 1
    assert Sharding(one).digest() == Sharding(other).digest() != Sharding(one[0]).digest()
    assert Sharding(one).state_dict().keys() == one.state_dict().keys()


def test_heads_stay_on_one_process() -> None:
    """Three heads of keys on two processes would be one and a half each."""
    torch.manual_seed(0)
    decoder = Decoder(width=16, heads=8, hidden=16)
    groups = engine.dependency_groups(decoder, torch.zeros(2, 5, dtype=torch.long))
    name, splits = "layers.0.attention.k_proj.weight", {"layers.0.attention.k_proj.weight": {0: 2}}
    two, three = (Plan({name: Slice.along(0, torch.arange(rows), (8, 16))}) for rows in (4, 6))
    check_whole_units(two, groups, splits)
    check_whole_units(three, groups, {name: {0: 3}})
    check_whole_units(three, groups, {})
    with pytest.raises(PlanError, match=f"'{name}' would keep 6 channels.*split a head"):
        check_whole_units(three, groups, splits)


def test_widths_that_processes_can_share() -> None:
    """Whole heads, equally many on each; of single channels any multiple, and anything of what is not split."""
    decoder = Decoder(width=16, heads=8, hidden=18)
    groups = engine.dependency_groups(decoder, torch.zeros(2, 5, dtype=torch.long))
    split = [f"layers.0.{name}.weight" for name in ("gate", "up", *(f"attention.{key}_proj" for key in "qkv"))]
    widths = shared_widths(groups, {name: {0: 2} for name in split})
    sizes = {group.name: group.size for group in groups if "layers.0." in group.name}
    assert {name: sorted(own) for name, own in widths.items()} == {
        name: [*range(2, size + 1, 2)] for name, size in sizes.items() if name in widths
    }
    assert {sizes[name] for name in widths} == {4, 18}
    assert shared_widths(groups, {}) == {}
    name = next(name for name, size in sizes.items() if size == 18)
    assert shared_widths(groups, {name + ".weight": {0: 5}})[name] == {5, 10, 15}


def test_a_network_that_runs_in_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what tensor parallelism wants, and other errors are as they are."""
    model = net()
    with pytest.raises(TraceError, match=r"^It does not run\.$"), Sharding(model).without_data():
        raise TraceError("It does not run.")
    monkeypatch.setattr(Sharding, "parts", lambda self: {"0.weight": {0: 2}})
    with pytest.raises(MisconfigurationException, match="does not run.*whole network is traced"):
        with Sharding(model).without_data():
            raise TraceError("It does not run.")
    with pytest.raises(PlanError, match="^Other$"), Sharding(model).without_data():
        raise PlanError("Other")
