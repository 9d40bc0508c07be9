"""Tests of scope, target and limits put together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress.selection import targets
from lightning_compress.selection.selector import Selector
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Net


@pytest.fixture(scope="module")
def subject() -> targets.Subject:
    """Groups `stem` (with `back`), `wide` and `fc` (the output)."""
    model, x = Net(), torch.ones(1, 3, 8, 8)
    graph = engine.trace(model, x)
    return targets.Subject(model, x, graph, engine.dependency_groups(model, x, graph=graph))


SCORES = {"stem": torch.arange(8.0), "wide": torch.arange(16.0) / 16}


def widths(subject: targets.Subject, selector: Selector, fraction: float = 1.0, **more: Any) -> dict[str, int]:
    """What stays of each group."""
    reference = targets.reference(subject, selector.target) if selector.target != "channels" else 0.0
    keep = selector.choose(subject, SCORES, more.get("previous", {}), fraction, reference, more.get("dense", {}))
    return {name: int(stays.sum()) for name, stays in keep.items()}


def test_scopes(subject: targets.Subject) -> None:
    """By group half of each goes; globally half of all, and `wide` has the lower scores; a function gives any key."""
    assert widths(subject, Selector(0.5)) == {"stem": 4, "wide": 8}
    found = widths(subject, Selector(0.5, scope="global"))
    assert sum(found.values()) == 12 and found["stem"] > 6
    assert widths(subject, Selector(0.5, scope=lambda group: "one")) == found
    assert widths(subject, Selector(0.5, scope="lightning_compress.selection.ladders:isomorphism")) == {
        "stem": 4,
        "wide": 8,
    }


def test_amounts_by_pattern_and_limits(subject: targets.Subject) -> None:
    """Patterns give each layer its amount; `max_amount`, `round_to` and `minimum` hold in any case."""
    assert widths(subject, Selector({"wide": 0.25, "stem": 0.5})) == {"stem": 4, "wide": 12}
    assert widths(subject, Selector(1.0, scope="global", max_amount={"wide": 0.5, "stem": 0.25})) == {
        "stem": 6,
        "wide": 8,
    }
    assert widths(subject, Selector(0.6, round_to=4)) == {"stem": 4, "wide": 8}
    assert widths(subject, Selector(1.0, minimum=3)) == {"stem": 3, "wide": 3}
    assert widths(subject, Selector(0.5, widths={"wide": [11, 3]})) == {"stem": 4, "wide": 11}


def test_the_schedule_goes_from_the_whole_model_to_the_target(subject: targets.Subject) -> None:
    """At half of the way half of what is to go is gone, also of a budget."""
    selector, dense = Selector(target="params", budget=1000), targets.reference(subject, "params")
    for fraction in (0.0, 0.5, 1.0):
        keep = selector.choose(subject, SCORES, {}, fraction, dense, {})
        wanted = dense - fraction * (dense - 1000)
        assert wanted - 400 < subject.counted("params", keep) <= wanted


def test_groups_without_scores_stay_whole(subject: targets.Subject) -> None:
    """A criterion without a score for a group leaves it alone."""
    keep = Selector(0.5).choose(subject, {"wide": SCORES["wide"]}, {}, 1.0, 0.0, {})
    assert list(keep) == ["wide"]


def test_groups_that_can_no_longer_be_pruned_are_named(subject: targets.Subject) -> None:
    """The settings know which groups could be pruned when the fit started."""
    frozen = [dataclasses.replace(g, reason="a hook reads it") if g.name == "wide" else g for g in subject.groups]
    later = dataclasses.replace(subject, groups=frozen)
    assert widths(later, Selector(0.5).checking(False, ["stem"])) == {"stem": 4}
    with pytest.warns(UserWarning, match="1 group of layers could be pruned .* no longer can .wide: a hook reads it"):
        assert widths(later, Selector(0.5).checking(False, ["stem", "wide"])) == {"stem": 4}


def test_what_is_gone_stays_gone(subject: targets.Subject) -> None:
    """Whatever the scores say now."""
    previous = {"stem": torch.arange(8) < 6, "wide": torch.ones(16, dtype=torch.bool)}
    keep = Selector(0.5).choose(subject, SCORES, previous, 1.0, 0.0, {})
    assert keep["stem"].nonzero()[:, 0].tolist() == [2, 3, 4, 5]


def test_a_compacted_model_goes_on(subject: targets.Subject) -> None:
    """Where half of `wide` has gone physically, half of the amount is no more."""
    assert widths(subject, Selector(0.5), dense={"wide": 32, "stem": 8}) == {"stem": 4, "wide": 16}


def test_out_of_reach_is_an_error(subject: targets.Subject) -> None:
    """It is found before training, with the lowest number that can be reached."""
    dense = targets.reference(subject, "macs")
    Selector(0.5, target="macs").check_reachable(subject, dense)
    with pytest.raises(
        MisconfigurationException,
        match="target of .* cannot be reached.*remain.*Kept in any case: .*is an output of the model",
    ):
        Selector(0.9, target="macs", layers=("wide",), max_amount=0.5).check_reachable(subject, dense)


class _Returning(nn.Module):
    """Returns its features if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.free, self.wide, self.head = nn.Linear(4, 2), nn.Linear(2, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, features: Any = None) -> Any:
        h = self.wide(self.free(x).relu()).relu()
        if features is not None:
            return features.pool(h)
        return self.head(h)


def test_out_of_reach_due_to_an_argument_says_how_to_declare_it() -> None:
    """Code that did not run keeps layers whole, until the argument that would run it is declared."""
    model, x = _Returning(), torch.ones(1, 4)
    for constants in (None, "features"):
        graph = engine.trace(model, x, constants=constants)
        subject = targets.Subject(model, x, graph, engine.dependency_groups(model, x, graph=graph))
        selector, dense = Selector(0.4, target="macs"), targets.reference(subject, "macs")
        if constants:
            selector.check_reachable(subject, dense)
        else:
            with pytest.raises(MisconfigurationException, match="wide .*did not run.*`constants='its name'`"):
                selector.check_reachable(subject, dense)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scope": "everywhere"}, "`scope='everywhere'`.*global, group, isomorphic"),
        ({"max_amount": 2.0}, "`max_amount` must be a fraction"),
        ({"round_to": 0}, "`round_to`"),
        ({"widths": {"wide": []}}, "`widths` of 'wide'"),
        ({"widths": {"wide": [0]}}, "`widths` of 'wide'"),
        ({"minimum": 0}, "`minimum`"),
        ({"target": "time"}, "`target`"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    """Each is an error that names the argument."""
    with pytest.raises(MisconfigurationException, match=message):
        Selector(**arguments)


def test_unknown_patterns_are_errors(subject: targets.Subject) -> None:
    """Those of `max_amount` too."""
    with pytest.raises(MisconfigurationException, match="'conv9' matches no layer"):
        widths(subject, Selector(0.5, max_amount={"conv9": 0.5}))


def test_uniform_ties_layers_of_one_structure() -> None:
    """Globally the layers lose other numbers of units; uniformly the same, whatever the target is."""
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    x = torch.zeros(1, 8)
    graph = engine.trace(net, x)
    subject = targets.Subject(net, x, graph, engine.dependency_groups(net, x, graph=graph))
    scores = {str(n): torch.arange(8.0) * 10**n for n in range(3)}
    for target in ("channels", "macs", "params"):
        reference = 0.0 if target == "channels" else targets.reference(subject, target)
        widths = [
            {name: int(stays.sum()) for name, stays in keep.items()}
            for keep in (
                Selector(0.5, "global", target, uniform=uniform).choose(subject, scores, {}, 1.0, reference, {})
                for uniform in (False, True)
            )
        ]
        assert len(set(widths[0].values())) > 1 and len(set(widths[1].values())) == 1
        assert max(widths[1].values()) < 8
