"""Plans: printable, storable, refused where they do not fit."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.compaction.format import latest
from engine.errors import PlanError
from tests.engine.exactness import masked, randomised, relative_error, run
from tests.engine.nets import Mean, analysis_of, dead, image, plain, snapshot, unchanged


def grouped() -> nn.Module:
    """A network whose plan has every kind of entry: joint cuts, folds, inner masks, attributes."""
    return randomised(
        nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 6, 3, padding=1, groups=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 1),
            Mean(),
            nn.Linear(4, 2),
        )
    )


def full_plan() -> tuple[nn.Module, dict[str, Any], engine.Plan]:
    """A model, masks and their plan."""
    model = grouped()
    masks = dead(model, {"0": [0, 1, 4, 6]})
    masks["4"] = {"weight": torch.ones(4, 6, 1, 1)}
    masks["4"]["weight"][1, 2] = 0
    return model, masks, analysis_of(model, image(), masks).plan


def stored(plan: engine.Plan) -> engine.Plan:
    """Through a file that is read with weights_only."""
    file = io.BytesIO()
    torch.save(plan.state_dict(), file)
    file.seek(0)
    return engine.Plan.from_state_dict(torch.load(file, weights_only=True))


def test_a_stored_plan_does_the_same() -> None:
    """Applied to the model, it gives bit for bit what the plan itself gives, which is the masked model's function."""
    model, masks, plan = full_plan()
    assert plan.slices and plan.folds and plan.masks and plan.attributes
    one, two = copy.deepcopy(model), copy.deepcopy(model)
    plan.apply(one)
    stored(plan).apply(two)
    assert unchanged(two, snapshot(one)) and repr(one) == repr(two)
    assert str(stored(plan)) == str(plan)
    assert relative_error(run(masked(model, masks), image(9)), run(two, image(9))) < 1e-9


def test_the_structure_of_a_plan_makes_a_fresh_model_fit() -> None:
    """Shapes without values: then the small state loads, and the model computes what was stored."""
    model, masks, plan = full_plan()
    fresh = grouped().train()
    plan.apply(model)
    structure = stored(plan.structure())
    assert structure.folds == () and not structure.masks
    structure.apply(fresh)
    fresh.load_state_dict(model.state_dict())
    assert relative_error(run(model, image()), run(fresh, image())) == 0


def test_a_plan_can_be_read() -> None:
    """Shapes before and after, folds, notes; an empty one says so."""
    _, _, plan = full_plan()
    text = str(plan)
    assert "0.weight  [8, 3, 1, 1] -> " in text and "absorbs the constants of removed channels" in text
    assert str(engine.Plan()) == "Plan: nothing to remove." and engine.Plan().is_empty and not plan.is_empty
    assert "Notes:\n  something" in str(engine.Plan(plan.slices, notes=("something",)))


def test_an_empty_plan_changes_nothing() -> None:
    """Bit for bit."""
    model = plain()
    state = snapshot(model)
    engine.Plan().apply(model)
    assert unchanged(model, state) and engine.Plan.from_state_dict(engine.Plan().state_dict()).is_empty


@pytest.mark.parametrize("state", [{}, {"format": "1"}, {"format": 0}, {"format": None}, [], None, "plan", 3])
def test_what_is_no_plan_is_refused(state: object) -> None:
    """Without a format number it is something else."""
    with pytest.raises(PlanError, match="not a compaction plan"):
        engine.Plan.from_state_dict(state)


def test_a_newer_plan_is_refused() -> None:
    """With both numbers."""
    newest = latest(engine.Plan)
    state = full_plan()[2].state_dict() | {"format": newest + 1}
    with pytest.raises(PlanError, match=f"format {newest + 1}; this version reads up to {newest}"):
        engine.Plan.from_state_dict(state)


DAMAGES = {
    "missing key": lambda s: s.pop("folds"),
    "slices of another type": lambda s: s.update(slices=[1]),
    "a cut without an index": lambda s: s["slices"]["0.weight"]["cuts"][0].pop("index"),
    "an index out of range": lambda s: s["slices"]["0.weight"]["cuts"][0]["index"].add_(100),
    "an index of floats": lambda s: s["slices"]["0.weight"].update(cuts=[{"dims": [0], "index": 3, "sizes": [1]}]),
    "a mask of floats": lambda s: s["masks"].update({"0.weight": torch.ones(2)}),
    "an attribute that is not a number": lambda s: s["attributes"].update({"0": {"out_channels": "many"}}),
    "a fold without a delta": lambda s: s["folds"][0].pop("delta"),
    "notes": lambda s: s.update(notes=3),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_plan_is_refused(damage: str) -> None:
    """Whatever is missing or of the wrong type, in one clear error."""
    state = full_plan()[2].state_dict()
    DAMAGES[damage](state)
    with pytest.raises(PlanError):
        engine.Plan.from_state_dict(state)


MODELS = {
    "lacks a layer": lambda: nn.Sequential(nn.Conv2d(3, 8, 1)),
    "other widths": lambda: nn.Sequential(nn.Conv2d(3, 9, 1), *list(grouped())[1:]),
    "other kinds of layers": lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Linear(4, 3), *list(grouped())[2:]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_another_model_is_refused(name: str) -> None:
    """With the parameter named, and the model as it was."""
    _, _, plan = full_plan()
    model = MODELS[name]()
    state, text = snapshot(model), repr(model)
    with pytest.raises(PlanError, match=r"'\w+(\.\w+)?'"):
        plan.apply(model)
    assert unchanged(model, state) and repr(model) == text


def test_applying_twice_is_refused() -> None:
    """The second time shapes do not fit, and nothing changes."""
    model, _, plan = full_plan()
    plan.apply(model)
    state = snapshot(model)
    with pytest.raises(PlanError, match="uncompacted model"):
        plan.apply(model)
    assert unchanged(model, state)


def test_a_plan_does_not_hold_the_model(tmp_path: Path) -> None:
    """A structure stored for resnet-like widths is small: indices only."""
    _, _, plan = full_plan()
    torch.save(plan.structure().state_dict(), tmp_path / "plan.pt")
    assert (tmp_path / "plan.pt").stat().st_size < 20_000


def halved(model: nn.Module) -> engine.Plan:
    """Close and remove the first half of what can go, repaired; the plan of that."""
    groups = engine.dependency_groups(model, image())
    keep = {
        g.name: torch.arange(g.size) >= g.size // 2 for g in groups if g.reason is None and len(g.rows.unique()) < 2
    }
    speedup = engine.ModelSpeedup(model, image(), engine.group_masks(groups, keep), confidence=1)
    speedup.speedup_model()
    return speedup.plan


def test_two_plans_as_one() -> None:
    """One plan stands for two compactions: it brings a fresh model to their shapes, stored or not."""
    fresh, model = plain(), plain()
    plans = [halved(model), halved(model)]
    assert all(not plan.is_empty for plan in plans)
    for one in (plans[0].then(plans[1]), stored(plans[0].then(plans[1]))):
        small = one.apply(copy.deepcopy(fresh))
        assert repr(small) == repr(model)
        small.load_state_dict(model.state_dict())
        assert torch.equal(run(small, image(9))[0], run(model, image(9))[0])


def test_a_plan_does_not_follow_one_that_ends_elsewhere() -> None:
    """With both shapes named."""
    plan = full_plan()[2]
    with pytest.raises(PlanError, match=r"starts from \(8, 3, 1, 1\) cannot follow one that ends with \(6, 3, 1, 1\)"):
        plan.then(plan)
