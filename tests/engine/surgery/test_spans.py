"""What a state dict says of norms whose statistics span channels that are gone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import CheckpointError
from engine.files.checkpoint import content_of, entries, load_state
from engine.surgery.spans import SPAN, Spanning, is_span, weights_of


class RootMeanSquare(nn.Module):
    """An RMS norm written out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Net(nn.Module):
    """A stream with a norm, read by a linear layer."""

    def __init__(self, norm: Callable[[int], nn.Module], size: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, size), norm(size), nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers for each sample."""
        return self.last(self.norm(self.first(x)))


class Groups(nn.GroupNorm):
    """Two groups."""

    def __init__(self, size: int) -> None:
        super().__init__(2, size)


class Inherited(nn.LayerNorm):
    """A norm that calls its base class."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        return super().forward(x.float())


NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "group": Groups, "written": RootMeanSquare, "inherited": Inherited}


def small(norm: Callable[[int], nn.Module], kept: int = 4, whole: int = 8) -> Net:
    """Return a network that lost some channels of its stream."""
    torch.manual_seed(0)
    return compacted(Net(norm, whole).eval(), kept, plain_norms=False)


def compacted(net: Net, kept: int, plain_norms: bool | str) -> Net:
    """Remove all but some channels of the stream, of each half as many."""
    x, keep = torch.randn(2, 3), torch.zeros(2, net.first.out_features // 2, dtype=torch.bool)
    keep[:, : kept // 2] = True
    groups = [group for group in engine.dependency_groups(net, x) if group.reason is None]
    masks = engine.group_masks(groups, {group.name: keep.flatten()[: group.size] for group in groups})
    engine.ModelSpeedup(net, x, masks, confidence=1, plain_norms=plain_norms).speedup_model()
    assert net.first.out_features == kept
    return net


@pytest.mark.parametrize("name", NORMS)
def test_a_network_narrowed_by_hand_refuses_it(name: str) -> None:
    """The shapes are the same, the function is another."""
    net = small(NORMS[name])
    assert isinstance(net.norm, Spanning) and net.state_dict()[f"norm.{SPAN}"].tolist() == [8]
    narrow = Net(NORMS[name], 4).eval()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*norm\._extra_state"):
        narrow.load_state_dict(net.state_dict())
    assert list(weights_of(net)) == list(narrow.state_dict())


@pytest.mark.parametrize("name", NORMS)
def test_all_ways_of_loading_take_it(name: str, tmp_path: Path) -> None:
    """Files of both formats, into a whole and into a small network; copies; and the network itself."""
    net, x = small(NORMS[name]), torch.randn(5, 3)
    torch.save(net.state_dict(), tmp_path / "small.pt")
    engine.save_safetensors(net, tmp_path / "small.safetensors")
    fresh = engine.compactable(Net(NORMS[name]).eval())
    fresh.load_state_dict(net.state_dict())
    others = [fresh, copy.deepcopy(net), pickle.loads(pickle.dumps(net)), small(NORMS[name])]
    others += [engine.load_compacted_state(Net(NORMS[name]).eval(), file) for file in tmp_path.iterdir()]
    others += [engine.load_compacted_state(small(NORMS[name]), file) for file in tmp_path.iterdir()]
    others[3].load_state_dict(net.state_dict())
    assert all(torch.equal(other(x), net(x)) for other in others)


@pytest.mark.parametrize("name", NORMS)
def test_files_without_it_load(name: str) -> None:
    """They were written before there was such an entry."""
    net, x = small(NORMS[name]), torch.randn(5, 3)
    old = net.state_dict()
    del old[f"norm.{SPAN}"]
    file = io.BytesIO()
    torch.save(old, file)
    fresh = engine.compactable(Net(NORMS[name]).eval())
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    assert torch.equal(fresh(x), net(x))


def test_other_spans_are_refused() -> None:
    """Four of eight channels and four of six have the same shapes."""
    one, other = small(nn.LayerNorm), small(nn.LayerNorm, 4, 6)
    state = dict(other.state_dict())  # without the plan
    with pytest.raises(CheckpointError, match=r"'norm' keeps the statistics of 8 channels.*6"):
        one.load_state_dict(state)


def test_a_file_with_another_span_is_refused(tmp_path: Path) -> None:
    """Nothing is changed then."""
    net = small(nn.LayerNorm)
    state = net.state_dict()
    state[f"norm.{SPAN}"] = torch.tensor([7])
    torch.save(state, tmp_path / "small.pt")
    fresh = Net(nn.LayerNorm)
    with pytest.raises(CheckpointError, match="statistics of 8 channels"):
        engine.load_compacted_state(fresh, tmp_path / "small.pt")
    assert fresh.first.out_features == 8


def test_a_network_that_grows_back_has_none() -> None:
    """Weights from before load, and the entry is gone."""
    net, whole = small(nn.LayerNorm), Net(nn.LayerNorm)
    with pytest.warns(UserWarning, match="grows back"):
        net.load_state_dict(whole.state_dict())
    assert not any(map(is_span, net.state_dict()))


def test_ordinary_norms_have_none() -> None:
    """What computes the same as its weights say needs no entry."""
    net = compacted(Net(nn.RMSNorm).eval(), 4, plain_norms="exact")
    assert not any(map(is_span, net.state_dict()))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", ["without the norm", "another span"])
def test_nothing_is_loaded_before_it_is_refused(how: str, strict: bool) -> None:
    """Weights in front of the norm, of the same shape in both, stay what they were."""
    net = small(nn.LayerNorm)
    weights, stored = dict(net.state_dict()), entries(content_of(net))
    if how == "without the norm":
        for entry in stored.values():
            entry["plans"] = [{**plan, "exchanges": []} for plan in entry["plans"]]
    else:
        weights[f"norm.{SPAN}"] = weights[f"norm.{SPAN}"] + 1
    torch.manual_seed(1)
    fresh = engine.compactable(Net(nn.LayerNorm).eval())
    before, classes = copy.deepcopy(fresh.state_dict()), [type(module) for module in fresh.modules()]
    if how == "without the norm" and not strict:
        load_state(fresh, weights, stored, strict)  # as torch does: what is unexpected is left out
        assert type(fresh.norm) is nn.LayerNorm and torch.equal(fresh.last.bias, net.last.bias)
        return
    with pytest.raises(CheckpointError, match="norm"):
        load_state(fresh, weights, stored, strict)
    assert [type(module) for module in fresh.modules()] == classes and before.keys() == fresh.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


def test_a_state_dict_with_another_span_changes_nothing() -> None:
    """Loaded by torch's own method."""
    state = small(nn.LayerNorm).state_dict()
    state[f"norm.{SPAN}"] += 1
    torch.manual_seed(1)
    fresh = engine.compactable(Net(nn.LayerNorm).eval())
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(CheckpointError, match="keeps the statistics of 8 channels"):
        fresh.load_state_dict(state)
    assert type(fresh.norm) is nn.LayerNorm and before.keys() == fresh.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


class _Versioned(RootMeanSquare):
    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 2}


class _VersionedNorm(nn.LayerNorm):
    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 2}


@pytest.mark.parametrize("norm", [_Versioned, _VersionedNorm])
def test_an_extra_state_of_the_users_stays(norm: Callable[[int], nn.Module], tmp_path: Path) -> None:
    """It is no number of channels, and loads as before."""
    net, x = small(norm), torch.randn(5, 3)
    assert net.state_dict()[f"norm.{SPAN}"] == weights_of(net)[f"norm.{SPAN}"] == {"version": 2}
    fresh = engine.compactable(Net(norm).eval())
    fresh.load_state_dict(net.state_dict())
    torch.save(net.state_dict(), tmp_path / "small.pt")
    assert all(torch.equal(other(x), net(x)) for other in (fresh, pickle.loads(pickle.dumps(net))))
    assert torch.equal(engine.load_compacted_state(Net(norm).eval(), tmp_path / "small.pt")(x), net(x))
