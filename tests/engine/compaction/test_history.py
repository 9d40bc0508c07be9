"""What a compacted model remembers."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

import engine
from engine.compaction.digest import digest
from engine.compaction.format import KEY
from engine.compaction.history import entry_of, history, is_compacted, same_steps, store_certificate
from engine.compaction.plan import Plan
from engine.verification.certificate import Certificate
from tests.engine.nets import dead, image, plain


def compacted(*closed: int) -> nn.Module:
    """A network of which some channels of the first layer are gone, in one compaction for each."""
    model = plain()
    for channel in closed:
        engine.ModelSpeedup(model, image(), dead(model, {"0": [channel], "1": [channel]}, bias=True)).speedup_model()
    return model


def test_each_compaction_is_a_step() -> None:
    """The model keeps the structure of each plan, without values, and its certificate; removing nothing is no step."""
    model = compacted(0, 0)
    assert [list(step.plan["slices"]["0.bias"]["before"]) for step in history(model)] == [[6], [5]]
    assert all(step.certificate["verified"] and not step.plan["folds"] for step in history(model))
    engine.ModelSpeedup(model, image(), {}).speedup_model()
    assert len(history(model)) == 2 and is_compacted(nn.Sequential(model)) and not is_compacted(plain())


def test_the_state_dict_tells() -> None:
    """The metadata hold what is stored, under the compacted module's path; the keys are those of any other."""
    model = compacted(1)
    state = nn.Sequential(model).state_dict()
    assert digest(state._metadata["0"][KEY]["compacted"][""]) == digest(entry_of(model))
    assert state.keys() == nn.Sequential(plain()).state_dict().keys()


def test_copies_remember() -> None:
    """A deep copy and a pickled copy have the history too, and one's next step is not the other's."""
    model = compacted(2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert digest(entry_of(other)) == digest(entry_of(model))
        engine.ModelSpeedup(other, image(), dead(other, {"0": [0]}, bias=True)).speedup_model()
        assert (len(history(other)), len(history(model))) == (2, 1)


def test_a_failed_compaction_is_no_step() -> None:
    """What is rolled back is forgotten."""
    model = compacted(3)
    change = Plan.from_state_dict(entry_of(compacted(0, 0))["plans"][1]).prepare(model)
    change.commit()
    assert len(history(model)) == 2
    change.rollback()
    assert len(history(model)) == 1


def test_attributes_of_before_are_kept() -> None:
    """Class and changed attributes of each module that was changed are remembered, and of no other."""
    (step,) = history(compacted(4))
    assert dict(step.was) == {
        "0": (nn.Conv2d, {"out_channels": 6}),
        "1": (nn.BatchNorm2d, {"num_features": 6}),
        "3": (nn.Conv2d, {"in_channels": 6}),
    }


def test_certificates_and_common_beginnings() -> None:
    """A certificate replaces that of the last step; plans are compared by content."""
    model, other = compacted(0, 1), compacted(0, 2)
    store_certificate(model, Certificate(notes=("mine",)).state_dict())
    assert [c["notes"] == ["mine"] for c in entry_of(model)["certificates"]] == [False, True]
    assert same_steps(history(model), entry_of(other)["plans"]) == 1
    assert same_steps(history(model), copy.deepcopy(entry_of(model)["plans"])) == 2
    assert torch.equal(model(image()), model(image()))
