"""Plans of released formats, in the present one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import engine
from engine.compaction.follow import entries
from engine.compaction.format import KEY, latest, stored, upgraded
from engine.errors import PlanError
from engine.files.checkpoint import read_checkpoint
from engine.surgery.kinds.replacements import Replacement
from tests.engine import golden


def plan_in(name: str, version: int) -> Any:
    """The state of the plan in a golden file."""
    content = read_checkpoint(golden.FOLDER / f"{name}-{version}.golden")[KEY]
    return next(iter(entries(content).values()))["plans"][0]


@pytest.mark.parametrize("name", golden.NETWORKS)
def test_an_old_plan_says_what_a_new_one_says(name: str) -> None:
    """All three versions of a file hold one plan, whose state is the same once it is upgraded."""
    plans = [engine.Plan.from_state_dict(plan_in(name, version)) for version in (1, 2, 3)]
    assert len({str(plan).partition("\nNotes:")[0] for plan in plans}) == 1
    assert (
        plan_in(name, 2)["format"] == 1
        and upgraded(plan_in(name, 2), engine.Plan).keys() == plans[2].state_dict().keys()
    )


def test_an_old_replacement() -> None:
    """Its class had the name of what is the kind now; the spread came later."""
    old = {"module": "a", "kind": "Mine", "inputs": [], "outputs": [], "weights": {}, "stored": {"weight": [2]}}
    state = {**engine.Plan().state_dict(), "format": 1, "pins": [], "widened": [], "headwise": [], "replaced": [old]}
    (replacement,) = engine.Plan.from_state_dict(state).of(Replacement)
    assert (replacement.module, replacement.class_name, replacement.stored) == ("a", "Mine", {"weight": (2,)})


@pytest.mark.parametrize("missing", ["pins", "widened", "headwise", "replaced", "slices"])
def test_an_incomplete_old_plan_is_refused(missing: str) -> None:
    """As damaged."""
    state = {**engine.Plan().state_dict(), "format": 1, "pins": [], "widened": [], "headwise": [], "replaced": []}
    assert upgraded(state, engine.Plan)["format"] == latest(engine.Plan)
    del state[missing]
    with pytest.raises(PlanError, match=f"damaged.*{missing}"):
        upgraded(state, engine.Plan)


def test_a_damaged_old_pin_is_refused() -> None:
    """Whatever stands in place of one."""
    state = {**engine.Plan().state_dict(), "format": 1, "widened": [], "headwise": [], "replaced": []}
    for pins in (3, [3], [{}], torch.ones(2)):
        with pytest.raises(PlanError, match="damaged"):
            upgraded({**state, "pins": pins}, engine.Plan)


@dataclass(frozen=True, eq=False)
class Longer(engine.Plan):
    """A plan with a further field, which is defined here and nowhere else."""

    scales: tuple[float, ...] = stored(
        lambda: (1.0,), save=lambda own, _: list(own), load=lambda own, _: tuple(map(float, own)), since=3
    )


def test_a_new_field_is_one_definition() -> None:
    """It raises the number of the format, is written and read, and an older version refuses it."""
    assert (latest(engine.Plan), latest(Longer)) == (2, 3)
    state = Longer(scales=(2.0, 3.0)).state_dict()
    assert state["format"] == 3 and Longer.from_state_dict(state).scales == (2.0, 3.0)
    with pytest.raises(PlanError, match="format 3; this version reads up to 2"):
        engine.Plan.from_state_dict(state)
    del state["scales"]
    with pytest.raises(PlanError, match="damaged.*scales"):
        Longer.from_state_dict(state)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("name", golden.NETWORKS)
def test_released_files_have_the_default_of_a_new_field(name: str, version: int) -> None:
    """And all else that they say."""
    state = plan_in(name, version)
    longer, plan = Longer.from_state_dict(state), engine.Plan.from_state_dict(state)
    assert longer.scales == (1.0,) and str(longer) == str(plan)
    assert upgraded(state, Longer).keys() == plan.state_dict().keys() | {"scales"}
