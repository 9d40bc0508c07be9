"""Eval mode for the length of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

import engine
from engine.errors import TraceError
from engine.running import evaluation
from engine.running.evaluation import evaluating, sharing_contents
from engine.running.snapshot import Snapshot
from tests.engine.nets import plain

CACHE: dict[str, list[int]] = {"sizes": [1]}


class Caching(nn.Linear):
    """Its code lies in a Python module that holds a cache."""


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


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_what_changed_between_two_runs_is_kept(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """A run that takes over what an earlier one has kept puts back what lies there now, and nothing older."""
    monkeypatch.setitem(CACHE, "sizes", [1])
    model, taken = Caching(2, 2), []

    class Counted(Snapshot):
        """Is noted with what it starts from."""

        def __init__(self, roots: list[Any], *args: Any, **kwargs: Any) -> None:
            taken.append(any(root is CACHE for root in roots))
            super().__init__(roots, *args, **kwargs)

    monkeypatch.setattr(evaluation, "Snapshot", Counted)

    def run() -> int:
        with evaluating(model):
            CACHE["sizes"].append(0)
            CACHE["new"] = [1]
        assert "new" not in CACHE
        return sum(taken)

    with sharing_contents() if shared else evaluating(nn.ReLU()):
        assert [run(), run()] == ([1, 1] if shared else [1, 2])
        CACHE["sizes"].append(2)
        assert run() == (2 if shared else 3) and CACHE == {"sizes": [1, 2]}
        CACHE["other"] = more = [3]
        assert run() == (3 if shared else 4) and CACHE == {"sizes": [1, 2], "other": more}
        more.append(4)
        run()
        assert CACHE == {"sizes": [1, 2], "other": [3, 4]}
        del CACHE["other"]


def test_nothing_is_shared_with_other_models() -> None:
    """What one model holds is skipped only where it is looked at."""
    one, other = Caching(2, 2), Caching(2, 2)
    CACHE["weights"] = [one.weight]  # type: ignore[list-item]
    try:
        with sharing_contents():
            for model in (one, other):
                with evaluating(model), torch.no_grad():
                    one.weight.requires_grad_(False)
                assert one.weight.requires_grad
    finally:
        del CACHE["weights"]


def test_the_iterator_of_a_loader_is_not_advanced() -> None:
    """Neither is it copied, with all its data; a module that advances it cannot be recorded."""
    model, loader = plain(), DataLoader([1, 2])
    model.batches = held = iter(loader)
    with evaluating(model), pytest.raises(TraceError, match="advances the iterator"):
        next(model.batches)  # type: ignore[arg-type]
    assert model.batches is held and int(next(held)) == 1


def test_generators_of_devices_that_hold_buffers_alone() -> None:
    """A run may draw there, too."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert evaluation._cuda_devices(net.modules()) == []
    with FakeTensorMode():
        net[1]._buffers["running_mean"] = torch.empty(2, device="cuda:1")
        net[0]._parameters["bias"] = nn.Parameter(torch.empty(2, device="cuda:0"))
    assert evaluation._cuda_devices(net.modules()) == [0, 1]


class Noting:
    """Notes calls of a layer."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, *args: Any) -> None:
        """As a hook."""
        self.calls.append(len(args))

    def note(self, *args: Any) -> None:
        """As a hook, too."""
        self.calls.append(len(args))


def test_what_hooks_note_is_forgotten() -> None:
    """Whether in a closure, in an object that is a hook, or in one whose method is: analysis has no side effects."""
    closure, first, second, third = list[int](), Noting(), Noting(), Noting()
    model = nn.Sequential(Caching(2, 4), Caching(4, 2))
    model[0].register_forward_hook(lambda *args: closure.append(1))
    model[0].register_forward_hook(first)
    model[1].register_forward_pre_hook(second.note)
    model.register_forward_hook(third)
    x = torch.ones(1, 2)
    engine.ModelSpeedup(model, x, {"0": {"weight": torch.tensor([[0], [1], [0], [1]]).expand(4, 2)}}).speedup_model()
    assert not closure and not first.calls and not second.calls and not third.calls
    model(x)
    assert closure == [1] and first.calls == [3] and second.calls == [2] and third.calls == [3]
