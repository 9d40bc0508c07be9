"""Tests of how targets are hit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchvision

import engine
from lightning_compress.selection import targets
from lightning_compress.selection.ladders import SCOPES, Descent, Ladder, Limits, channels_per_unit, ladder, pools
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.small import MODELS, SIDE


def subject(name: str) -> targets.Subject:
    """One of the small models."""
    torch.manual_seed(0)
    model, x = MODELS[name]().eval(), torch.rand(2, 3, SIDE, SIDE)
    graph = engine.trace(model, x)
    return targets.Subject(model, x, graph, engine.dependency_groups(model, x, graph=graph))


def ladders(of: targets.Subject, **limits: Any) -> list[Ladder]:
    """Ladders of all prunable groups under random scores."""
    generator = torch.Generator().manual_seed(1)
    groups = [group for group in of.groups if group.reason is None]
    return [ladder(g, torch.rand(g.size, generator=generator), None, Limits(**limits)) for g in groups]


def descent(rungs: list[Ladder], scope: str) -> Descent:
    """All of them, under a scope."""
    return Descent([pool for _, pool in pools(rungs, {one.group.name: 1.0 for one in rungs}, SCOPES[scope])])


@pytest.mark.parametrize("seed", range(20))
def test_smallest_that_fits(seed: int) -> None:
    """It is what trying all of them finds, with few trials, for curves with plateaus and jumps."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 5, (300,), generator=generator) ** int(1 + seed % 4)
    costs = (float(steps.sum()) - torch.cat([torch.zeros(1), steps.cumsum(0)])).tolist()
    asked: list[int] = []

    def cost(n: int) -> float:
        asked.append(n)
        return costs[n]

    for budget in (costs[0], costs[0] / 2, costs[0] / 10, 0.0, -1.0):
        asked.clear()
        expected = next((n for n, c in enumerate(costs) if c <= budget), len(costs) - 1)
        assert targets.smallest(cost, len(costs) - 1, budget) == expected
        assert len(asked) <= 2 * math.log2(len(costs)) + 4


def test_a_tolerance_ends_the_search_early() -> None:
    """What is near enough is taken."""
    asked: list[int] = []
    found = targets.smallest(lambda n: asked.append(n) or 100.0 - n, 100, 37.5, tolerance=5.0)  # type: ignore[func-returns-value]
    assert abs(100 - found - 37.5) <= 5 and len(asked) == 3


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("name", "target", "round_to"),
    [("resnet18", "macs", 2), ("resnet18", "params", 1), ("vit_b_16", "macs", 1), ("vit_b_16", "params", 8)],
)
def test_a_budget_is_hit_within_one_rounding_unit_of_one_group(
    name: str, scope: str, target: str, round_to: int
) -> None:
    """The compacted model has at most the budget, and one step less would be over it; counted after compaction."""
    of = subject(name)
    going = descent(ladders(of, round_to=round_to), scope)
    dense = targets.reference(of, target)
    for left in (0.7, 0.4):
        keep = targets.hit_count(of, going, target, left * dense)
        small = of.compacted(keep)
        found = engine.count_flops_params(small, of.example, verbose=False)[0 if target == "macs" else 1]
        assert found <= left * dense
        step = next(n for n in range(len(going) + 1) if _same(going.keep(n), keep))
        assert of.counted(target, going.keep(step - 1)) > left * dense
        assert all(channels_per_unit(g) * int(keep[g.name].sum()) % round_to == 0 for g in of.groups if g.name in keep)


def _same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_out_of_reach_goes_as_far_as_it_may() -> None:
    """A budget that nothing reaches takes all that may go."""
    of = subject("resnet18")
    going = descent(ladders(of), "global")
    assert _same(targets.hit_count(of, going, "params", 1.0), going.keep(len(going)))


def test_the_latency_search_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts parameters the budget is met, from the ratio to the unpruned model; load cancels out."""
    of = subject("resnet18")
    load = iter(range(1, 10_000))

    def seconds(self: targets.Subject, models: Any, rounds: int = 15) -> Any:
        now = next(load)  # the machine gets slower and slower
        return [[now * sum(p.numel() for p in m.parameters()) * 1e-9] * rounds for m in models]

    monkeypatch.setattr(targets.Subject, "seconds", seconds)
    dense = targets.reference(of, "latency")
    keep = targets.hit_latency(of, descent(ladders(of), "group"), 0.5 * dense, dense)
    left = of.counted("params", keep) / of.counted("params", {})
    assert left == pytest.approx(0.5, rel=targets.TOLERANCE)


def test_a_latency_that_cannot_be_reached_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what remains; a target that is reached causes no warning."""
    of = subject("resnet18")
    total = sum(p.numel() for p in of.model.parameters())

    def seconds(self: targets.Subject, models: list[torch.nn.Module], rounds: int = 15) -> list[list[float]]:
        return [[0.5 + sum(p.numel() for p in m.parameters()) / total] * rounds for m in models]

    monkeypatch.setattr(targets.Subject, "seconds", seconds)
    steps = descent(ladders(of), "group")
    with pytest.warns(UserWarning, match=r"target of 0\.2 s per forward pass is not reached: 0\.\d+ s of 1\.5 s"):
        keep = targets.hit_latency(of, steps, 0.2, 1.5)
    assert all(int(kept.sum()) == 1 for kept in keep.values())
    targets.hit_latency(of, steps, 1.0, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "left"), [("group", 0.4), ("global", 0.7)])
def test_a_measured_latency_is_hit(scope: str, left: float) -> None:
    """What is found takes as long as was asked for, measured anew: within a tenth of it."""
    torch.manual_seed(0)
    model, x = torchvision.models.resnet18().eval(), torch.rand(1, 3, 64, 64)
    graph = engine.trace(model, x)
    of = targets.Subject(model, x, graph, engine.dependency_groups(model, x, graph=graph))
    dense = targets.reference(of, "latency")
    small = of.compacted(targets.hit_latency(of, descent(ladders(of), scope), left * dense, dense))

    def ratios() -> list[float]:
        return [b / a for a, b in zip(*of.seconds([of.model, small], rounds=60), strict=True)]

    assert targets.steady(ratios) == pytest.approx(left, rel=0.1)


def test_what_scatters_is_measured_again() -> None:
    """A few that agree are enough; of what jumps there are more, and not for ever."""
    asked: list[int] = []

    def measure(spread: float) -> list[float]:
        asked.append(1)
        return [1.0, 1.0 + spread, 1.0 - spread]

    assert targets.steady(lambda: measure(0.001)) == 1.0 and len(asked) == 1
    assert targets.steady(lambda: measure(0.9)) == 1.0 and len(asked) == 1 + targets.REPEATS


def test_seconds_are_measured_in_turns() -> None:
    """A network that does a hundred times as much takes longer, and the modes are as before."""
    of = subject("resnet18")
    wide = MODELS["resnet18"]().train()
    one, two = of.seconds([of.model, torch.nn.Sequential(wide, torch.nn.Identity())], rounds=3)
    assert len(one) == len(two) == 3 and min(one + two) > 0
    assert wide.training and not of.model.training


def test_a_copy_shares_what_it_has_to() -> None:
    """What is named as shared is not copied, so that a LightningModule does not take its Trainer along."""
    of = subject("resnet18")
    of.model.anchor = anchor = object.__new__(
        type("Anchor", (), {"__deepcopy__": lambda self, memo: pytest.fail("copied")})
    )
    shared = targets.Subject(of.model, of.example, of.graph, of.groups, shared=(anchor,))
    assert shared.compacted({}).anchor is anchor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flops", 0.5, None), "`target` must be one of channels, latency, macs, params, got 'flops'"),
        (("macs", {"*": 0.5}, None), "`amount` by pattern requires `target='channels'`.*max_amount"),
        (("channels", 0.5, 10.0), "`budget` requires `target` 'latency'"),
        (("macs", 0.5, 0), "`budget` must be a finite number of multiply-accumulates > 0, got 0"),
    ],
)
def test_bad_targets(arguments: tuple[Any, ...], message: str) -> None:
    """Each is an error that names the argument."""
    with pytest.raises(MisconfigurationException, match=message):
        targets.check_target(*arguments)
