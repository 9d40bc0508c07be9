"""From a model and masks to a plan."""

from __future__ import annotations

import torch
from torch import nn

import engine
from engine.compaction.build import canonical_tensors
from tests.engine.exactness import randomised
from tests.engine.nets import Mean, analysis_of, dead, image, plain, snapshot, unchanged


def test_analysis_only_reads() -> None:
    """The model is bit for bit as before."""
    model = plain()
    state = snapshot(model)
    analysis_of(model, image(), dead(model, {"0": [0, 1]}))
    assert unchanged(model, state)


def test_the_plan_says_what_the_decision_keeps() -> None:
    """Each stored value's shape after the plan is the predicted one."""
    model = plain()
    analysis = analysis_of(model, image(), dead(model, {"0": [0, 1], "3": [1]}))
    for name, value in analysis.structure.graph.stored.items():
        predicted = analysis.kept.shrunk.shape(value)
        assert predicted == (analysis.plan.slices[name].shape if name in analysis.plan.slices else value.shape)


def test_masks_inside_of_what_stays_are_in_the_plan() -> None:
    """In the new shape, where anything is masked; others are left out."""
    model = plain()
    masks = dead(model, {"0": [0, 1]}, bias=True)
    masks["3"] = {"weight": torch.ones(5, 6, 3, 3)}
    masks["3"]["weight"][2, 4] = 0
    masks["7"] = {"weight": torch.ones(3, 5)}
    plan = analysis_of(model, image(), masks).plan
    width = plan.slices["3.weight"].shape[1]
    assert plan.masks["3.weight"].shape == (5, width, 3, 3) and (~plan.masks["3.weight"]).sum() == 9
    assert "7.weight" not in plan.masks


def test_tied_parameters_stand_once() -> None:
    """Under their canonical name."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    graph = engine.trace(model, torch.ones(1, 3))
    assert set(canonical_tensors(model, graph)) == {"0.weight", "0.bias", "1.bias"}


def test_nothing_masked_is_an_empty_plan() -> None:
    """Also where weights happen to be zero."""
    model = plain()
    nn.init.zeros_(model[0].weight)
    assert analysis_of(model, image(), {}).plan.is_empty
    assert not analysis_of(model, image(), None).plan.is_empty


def test_reasons_for_what_stays_are_noted() -> None:
    """What the trace could not record is told to the reader."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 1), Mean(), nn.Linear(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise ValueError("targets wanted")
            return self.body(x)

    model = randomised(Detector())
    plan = analysis_of(model, image(), dead(model, {"body.0": [0]})).plan
    assert any("targets wanted" in note for note in plan.notes)
