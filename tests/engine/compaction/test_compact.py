"""Applying a plan: in place, with optimizers, all or nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import engine
from engine.compaction.plan import Plan
from engine.compaction.slices import Slice
from engine.errors import PlanError
from tests.engine.exactness import Masks, randomised
from tests.engine.nets import Mean, analysis_of, dead, image, plain, snapshot, unchanged

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-3),
    "adam amsgrad": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, 1e-3, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


def network() -> nn.Module:
    """Smooth, so that rounding is not amplified by kinks."""
    return randomised(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.Tanh(),
            nn.Conv2d(6, 5, 3),
            nn.BatchNorm2d(5),
            nn.Tanh(),
            Mean(),
            nn.Linear(5, 3),
        )
    )


def step(model: nn.Module, optimizer: Optimizer, seed: int, masks: Masks | None = None) -> float:
    """One step of training; masked weights stay zero."""
    optimizer.zero_grad()
    loss = (model(image(seed=seed, batch=4)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    if masks:
        zero(model, masks)
    return float(loss.detach())


@torch.no_grad()
def zero(model: nn.Module, masks: Masks) -> None:
    """Multiply parameters by their masks."""
    for name, entries in masks.items():
        for key, mask in entries.items():
            getattr(model.get_submodule(name), key).mul_(mask)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(name: str) -> None:
    """From the same state, masked and compacted model have the same losses and outputs for further steps."""
    model = network().train()
    masks = engine.fix_mask_conflict(dead(model, {"0": [0, 4], "3": [1, 2]}), model, image())
    optimizer = OPTIMIZERS[name](model.parameters())
    zero(model, masks)
    for seed in range(3):
        step(model, optimizer, seed, masks)
    small = copy.deepcopy(model)
    again = OPTIMIZERS[name](small.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    engine.ModelSpeedup(small, image(), masks).speedup_model(again)
    assert small[0].weight.shape == (4, 3, 3, 3) and small[3].weight.shape == (3, 4, 3, 3)
    for parameter, state in again.state.items():
        assert all(t.shape == parameter.shape for t in state.values() if isinstance(t, Tensor) and t.ndim)
    for seed in range(3, 8):
        losses = step(model, optimizer, seed, masks), step(small, again, seed)
        assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    torch.testing.assert_close(model(image(9)), small(image(9)), rtol=1e-9, atol=1e-9)


def test_factored_moments_are_refused() -> None:
    """Adafactor averages over whole tensors, so that the small network would train otherwise; nothing is changed."""
    model = network().train()
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    masks = engine.fix_mask_conflict(dead(model, {"0": [0, 4], "3": [1, 2]}), model, image())
    step(model, optimizer, 0, masks)
    shapes = [parameter.shape for parameter in model.parameters()]
    with pytest.raises(PlanError, match="Adafactor updates an entry of a parameter depending on the other entries"):
        engine.ModelSpeedup(model, image(), masks).speedup_model(optimizer)
    assert [parameter.shape for parameter in model.parameters()] == shapes


def test_several_optimizers() -> None:
    """Each cuts what it holds."""
    model = network().train()
    optimizers = [torch.optim.Adam(model[:3].parameters()), torch.optim.SGD(model[3:].parameters(), 0.1, momentum=0.9)]
    for optimizer in optimizers:
        step(model, optimizer, 0)
    masks = dead(model, {"0": [0, 1]}, bias=True)
    engine.ModelSpeedup(model, image(), masks).speedup_model(optimizers)
    assert optimizers[0].state[model[0].weight]["exp_avg"].shape == model[0].weight.shape
    assert optimizers[1].state[model[3].weight]["momentum_buffer"].shape == model[3].weight.shape
    for optimizer in optimizers:
        step(model, optimizer, 1)


class Odd(torch.optim.SGD):
    """Keeps a state of another shape than its parameter's."""

    def step(self, closure: Any = None) -> Any:
        """Step, and note the rows' norms."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["factors"] = p.detach().flatten(1).norm(dim=0) if p.ndim > 1 else p.detach()[:1]
        return super().step(closure)


@pytest.mark.parametrize("confidence", [0, 8])
def test_optimizer_state_that_cannot_be_cut_is_refused(confidence: int) -> None:
    """With the optimizer, the entry and the parameter named; model and optimizer are untouched."""
    model = network().train()
    optimizer = Odd(model.parameters(), 0.1)
    step(model, optimizer, 0)
    state, text = snapshot(model), repr(model)
    kept = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(PlanError, match=r"Odd keeps 'factors' of '0\.\w+' in shape"):
        engine.ModelSpeedup(model, image(), dead(model, {"0": [0]}, bias=True), confidence=confidence).speedup_model(
            optimizer
        )
    assert unchanged(model, state) and repr(model) == text
    now = optimizer.state_dict()
    for key, entries in kept["state"].items():
        assert all(torch.equal(now["state"][key][n], t) for n, t in entries.items())


def test_objects_stay() -> None:
    """Modules, parameters, buffers, hooks: what others hold is what is made small."""
    model = network()
    modules, parameters = list(model.modules()), list(model.parameters())
    buffers = dict(model.named_buffers())
    calls: list[int] = []
    model[3].register_forward_hook(lambda m, a, out: calls.append(out.shape[1]))
    names = list(model.state_dict())
    engine.ModelSpeedup(model, image(), dead(model, {"0": [0], "3": [1, 2]}, bias=True)).speedup_model()
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(buffers[k] is b for k, b in model.named_buffers())
    assert list(model.state_dict()) == names
    calls.clear()
    model(image())
    assert calls == [model[3].out_channels]


def test_frozen_layers_stay_frozen() -> None:
    """``requires_grad`` False stays False, and True stays True; frozen weights are cut like others."""
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1]}, bias=True)).speedup_model()
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 8
    model.train()(image()).sum().backward()
    assert model[0].weight.grad is None and model[3].weight.grad.shape == model[3].weight.shape


def test_gradients_that_are_being_accumulated_are_cut() -> None:
    """Half of an accumulation before the compaction, half after it: the gradients of what stays are the masked ones."""
    model = network().train()
    masks = engine.fix_mask_conflict(dead(model, {"0": [0, 1]}, bias=True), model, image())
    zero(model, masks)
    small = copy.deepcopy(model)
    for half in (model, small):
        half(image(seed=1)).sum().backward()
    speedup = engine.ModelSpeedup(small, image(), masks)
    speedup.speedup_model(training=True)
    for half in (model, small):
        half(image(seed=2)).sum().backward()
    plan = speedup.plan
    for (name, big), (_, little) in zip(model.named_parameters(), small.named_parameters(), strict=True):
        expected = plan.slices[name].apply(big.grad) if name in plan.slices else big.grad
        torch.testing.assert_close(little.grad, expected, rtol=1e-9, atol=1e-12)


def test_what_takes_up_constants_loses_its_gradient() -> None:
    """A bias that constants are folded into is another number than its gradient was computed for."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), Mean(), nn.Linear(6, 3))).train()
    model(image()).sum().backward()
    engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1]}, bias=True)).speedup_model()
    assert model[3].bias.grad is None and model[3].weight.grad.shape == (3, 4)


def test_a_rollback_restores_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, gradients and attributes, bit for bit."""
    model = network().train()
    model(image()).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    moments = optimizer.state[model[0].weight]["exp_avg"].clone()
    state, text = snapshot(model), repr(model)

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.verification.proof.Proof.conclude", fail)
    with pytest.raises(KeyboardInterrupt):
        engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1]}, bias=True)).speedup_model(optimizer)
    assert unchanged(model, state) and repr(model) == text
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments)
    model(image()).sum().backward()
    optimizer.step()


def test_masks_inside_of_what_stays_are_applied() -> None:
    """The small weights are ``slice(parameter * mask) + fold``."""
    model = network()
    masks = dead(model, {"0": [0, 1]}, bias=True)
    masks["3"] = {"weight": torch.ones(5, 6, 3, 3)}
    masks["3"]["weight"][2, 4, 1] = 0
    analysis = analysis_of(model, image(), masks)
    expected = analysis.plan.slices["3.weight"].apply(model[3].weight.detach() * masks["3"]["weight"])
    for fold in analysis.plan.folds:
        expected = fold.apply(expected) if fold.name == "3.weight" else expected
    analysis.plan.apply(model)
    assert torch.equal(model[3].weight, expected)


def test_a_compacted_model_is_pickled_and_copied() -> None:
    """Nothing of the analysis sticks to it."""
    model = plain()
    engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1]}, bias=True)).speedup_model()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(image()), model(image()))
    assert all(
        type(v) is not bool and type(v) is int
        for m in model.modules()
        for k, v in vars(m).items()
        if k.endswith("_channels")
    )


def test_weights_of_recurrent_layers_are_put_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN wants them in one piece of memory: after the exchange, and after it was taken back."""
    seen: list[tuple[int, ...]] = []
    flatten = nn.GRU.flatten_parameters

    def watched(self: nn.GRU) -> None:
        seen.append(tuple(self.weight_hh_l0.shape))
        flatten(self)

    net = nn.Sequential(nn.GRU(3, 4, batch_first=True))
    monkeypatch.setattr(nn.GRU, "flatten_parameters", watched)
    rows = torch.tensor([0, 2, 4, 6, 8, 10])
    cuts = {f"0.{n}": Slice.along(0, rows, tuple(p.shape)) for n, p in net[0].named_parameters() if n != "weight_hh_l0"}
    columns = Slice.along(1, torch.tensor([0, 2]), (6, 4))
    cuts["0.weight_hh_l0"] = Slice.along(0, rows, (12, 4)).then(columns)
    change = Plan(cuts, attributes={"0": {"hidden_size": 2}}).prepare(net)
    change.commit()
    assert net(torch.zeros(1, 5, 3))[0].shape == (1, 5, 2)
    change.rollback()
    assert seen == [(6, 2), (12, 4)] and net(torch.zeros(1, 5, 3))[0].shape == (1, 5, 4)
