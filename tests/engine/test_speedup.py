"""Masks in, a small and verified network out."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import engine
from engine.contraction import Contraction
from engine.errors import InputError, StaleGraphError, TraceError
from engine.folds import Fold
from engine.keep import alive
from tests.engine.exactness import KINDS, masked, randomised, relative_error, run
from tests.engine.nets import Mean, dead, image, plain, residual_net, snapshot, unchanged


def test_a_model_in_train_mode_stays_in_train_mode() -> None:
    """Each module keeps its own mode."""
    model = plain().train()
    model[1].eval()
    modes = [m.training for m in model.modules()]
    masks = dead(model, {"0": [0, 1]}, bias=True)
    reference = run(copy.deepcopy(masked(model, masks)), image())
    speedup = engine.ModelSpeedup(model, image(), masks)
    assert speedup.speedup_model() is model
    assert [m.training for m in model.modules()] == modes and speedup.certificate.verified
    assert relative_error(reference, run(model, image())) < 1e-9


def test_statistics_and_random_state_are_untouched() -> None:
    """Verification runs the model, in eval mode, and draws its own numbers."""
    model = plain().train()
    masks = engine.fix_mask_conflict(dead(model, {"0": [0, 1]}), model, image())
    mean, batches = model[4].running_mean.clone(), model[4].num_batches_tracked.clone()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    engine.ModelSpeedup(model, image(), masks).speedup_model()
    assert torch.equal(model[4].running_mean, mean) and model[4].num_batches_tracked == batches
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()


def test_nothing_masked_changes_nothing() -> None:
    """An empty plan, bit for bit the same model, no claim of a verification."""
    model = plain()
    state = snapshot(model)
    for masks in ({}, {"0": {"weight": torch.ones(6, 3, 3, 3)}}):
        speedup = engine.ModelSpeedup(model, image(), masks)
        speedup.speedup_model()
        assert speedup.plan.is_empty and unchanged(model, state) and speedup.certificate.exact_in_train


def test_compacting_twice() -> None:
    """A second compaction of the small model, with masks of its own, is exact again; the same object refuses."""
    model = residual_net()
    masks = engine.fix_mask_conflict(dead(model, {"stem": [0, 1], "branch": [0, 1]}), model, image())
    speedup = engine.ModelSpeedup(model, image(), masks)
    speedup.speedup_model()
    with pytest.raises(StaleGraphError):
        speedup.speedup_model()
    more = dead(model, {"stem": [0], "branch": [0]}, bias=True)
    reference = run(masked(model, more), image(9))
    engine.ModelSpeedup(model, image(), more).speedup_model()
    assert model.stem.out_channels <= 4 and relative_error(reference, run(model, image(9))) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_without_masks_zeros_are_removed(kind: str) -> None:
    """What is zero in the weights goes, whoever made it zero."""
    model = masked(plain(), KINDS[kind](plain(), 1))
    reference = run(model, image(9))
    engine.ModelSpeedup(model, image()).speedup_model()
    assert relative_error(reference, run(model, image(9))) < 1e-9


def test_confidence_zero_runs_nothing() -> None:
    """The shapes are those that the rules predict; the certificate says that no numbers were compared."""
    model = plain()
    masks = dead(model, {"0": [0, 1]}, bias=True)
    reference = run(masked(model, masks), image())
    speedup = engine.ModelSpeedup(model, image(), masks, confidence=0)
    calls: list[int] = []
    model.register_forward_hook(lambda *a: calls.append(1))
    speedup.speedup_model()
    assert calls == [] and not speedup.certificate.verified and "not verified" in str(speedup.certificate)
    assert relative_error(reference, run(model, image())) < 1e-9


@pytest.mark.parametrize("confidence", [-1, 0.5, "8", None])
def test_bad_confidence_is_refused(confidence: Any) -> None:
    """With the value."""
    with pytest.raises(InputError, match=f"`confidence`.*{confidence!r}"):
        engine.ModelSpeedup(plain(), image(), {}, confidence=confidence)


def test_a_rejected_input_leaves_the_model_alone() -> None:
    """The error names model and shape, at construction."""
    model = plain()
    state = snapshot(model)
    with pytest.raises(TraceError, match=r"Sequential rejected the example input \(\(2, 4, 6, 6\)"):
        engine.ModelSpeedup(model, torch.zeros(2, 4, 6, 6, dtype=torch.float64), {})
    assert unchanged(model, state)


def test_the_batch_dimension_may_be_another() -> None:
    """Sequence first: samples are drawn along dimension 1."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    masks = dead(model, {"0": [0, 1, 2]})
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    reference = run(masked(model, masks), x)
    speedup = engine.ModelSpeedup(model, x, masks, batch_dim=1, confidence=3)
    speedup.speedup_model()
    assert speedup.certificate.shapes[0] == (5, 3, 4) and model[0].out_features == 5
    assert relative_error(reference, run(model, x)) < 1e-9


def test_a_graph_saves_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one, the model is not traced again before it is changed."""
    model = plain()
    graph = engine.trace(model, image())
    monkeypatch.setattr("engine.speedup.trace", None)
    engine.ModelSpeedup(model, None, dead(model, {"0": [0]}, bias=True), graph=graph).speedup_model()
    assert model[0].out_channels < 6


def test_a_root_that_is_a_layer() -> None:
    """The model's own output stays whole, so nothing happens."""
    layer = nn.Conv2d(3, 4, 1).double()
    engine.ModelSpeedup(layer, image(), {"": dead(nn.Sequential(layer), {"0": [0]})["0"]}).speedup_model()
    assert layer.out_channels == 4


DEFECTS = {
    "canonical swaps outputs and inputs": "engine.contraction.Contraction.canonical",
    "layout swaps outputs and inputs": "engine.contraction.Contraction.layout",
    "constants are not folded": "engine.build.folds_of",
    "constants are folded the wrong way": "engine.folds.Fold.apply",
    "a live channel is called dead": "engine.keep.alive",
    "use is lost": "engine.use.Use.add",
    "carriers are not asked for": "engine.keep.Consumer.needs",
    "batch norm hands on its input": "rule:batch_norm",
    "sigmoid of a dead channel is zero": "rule:sigmoid",
}


def square() -> nn.Module:
    """Equal widths, so that swapped axes fit, with a border, a norm, a gate and biases."""
    return randomised(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Sigmoid(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(4, 4, 1),
            nn.Tanh(),
            Mean(),
            nn.Linear(4, 2),
        )
    )


def _break(monkeypatch: pytest.MonkeyPatch, name: str) -> engine.Registry:
    """Put a defect into the engine, and return the rules to use."""
    where = DEFECTS[name]
    canonical, layout, apply = Contraction.canonical, Contraction.layout, Fold.apply
    replacements: dict[str, Any] = {
        "engine.contraction.Contraction.canonical": lambda self, w: (
            canonical(self, w.transpose(0, 1)) if w.ndim > 1 and w.shape[0] == w.shape[1] else canonical(self, w)
        ),
        "engine.contraction.Contraction.layout": lambda self, a: (
            layout(self, a).transpose(0, 1) if self.weight.shape[0] == self.weight.shape[1] else layout(self, a)
        ),
        "engine.build.folds_of": lambda *a: iter(()),
        "engine.folds.Fold.apply": lambda self, t: apply(dataclasses.replace(self, delta=-self.delta), t),
        "engine.keep.alive": lambda s, f: _without_first_live(s, alive(s, f)),
        "engine.use.Use.add": lambda self, value, used: None,
        "engine.keep.Consumer.needs": lambda self, keep: iter(()),
    }
    if not where.startswith("rule:"):
        monkeypatch.setattr(where, replacements[where])
        return engine.RULES
    op = where.removeprefix("rule:")

    def wrong(node: engine.Node, constants: Any) -> Any:
        known = constants[node.inputs[0]]
        return [known if op == "batch_norm" else torch.where(known.isnan(), known, 0.0)]

    mine = engine.RULES[op]
    rest = dataclasses.replace(mine, ops=tuple(o for o in mine.ops if o != op))
    others = [rest if rule is mine else rule for rule in engine.RULES.distinct()]
    return engine.Registry([*others, dataclasses.replace(mine, ops=(op,), constants=wrong)])


def _without_first_live(structure: Any, keep: torch.Tensor) -> torch.Tensor:
    live = (keep & structure.free()).nonzero()[:, 0]
    keep = keep.clone()
    keep[live[:1]] = False
    return keep


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_engine_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate refuses what a broken analysis gives, and the model is bit for bit as it was."""
    model = square()
    masks = dead(model, {"0": [0, 1], "3": [1], "5": [2, 3]})
    state, text = snapshot(model), repr(model)
    rules = _break(monkeypatch, name)
    with pytest.raises(engine.errors.EngineError):
        engine.ModelSpeedup(model, image(), masks, rules=rules).speedup_model()
    assert unchanged(model, state) and repr(model) == text


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_shows_in_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a certificate the broken result is wrong, so that comparing with the masked model finds it too."""
    model = square()
    masks = dead(model, {"0": [0, 1], "3": [1], "5": [2, 3]})
    reference = run(masked(model, masks), image())
    rules = _break(monkeypatch, name)
    try:
        engine.ModelSpeedup(model, image(), masks, confidence=0, rules=rules).speedup_model()
        error = relative_error(reference, run(model, image()))
    except (engine.errors.EngineError, RuntimeError) as found:  # it does not even fit
        assert str(found)
    else:
        assert error > 1e-6


def test_without_a_defect_the_same_masks_pass() -> None:
    """So that the test above tests the defects."""
    model = square()
    masks = dead(model, {"0": [0, 1], "3": [1], "5": [2, 3]})
    reference = run(masked(model, masks), image(9))
    speedup = engine.ModelSpeedup(model, image(), masks)
    speedup.speedup_model()
    assert speedup.plan.folds and relative_error(reference, run(model, image(9))) < 1e-9


def test_a_repair_that_does_nothing_is_noticed() -> None:
    """If repair gave its input back, constants and disagreements would be left."""

    def left(fix: Any) -> tuple[int, bool]:
        model = residual_net()
        masks = fix(dead(model, {"stem": [0, 1], "branch": [0, 1]}), model, image())
        speedup = engine.ModelSpeedup(model, image(), masks)
        speedup.speedup_model()
        return model.stem.out_channels, speedup.certificate.exact_in_train

    assert left(engine.fix_mask_conflict) == (4, True)
    assert left(lambda masks, *a: masks) != (4, True)
