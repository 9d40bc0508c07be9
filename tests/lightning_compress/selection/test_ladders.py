"""Tests of the order in which units go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress.selection.ladders import (
    SCOPES,
    Descent,
    Ladder,
    Limits,
    Pool,
    bundled,
    check_limits,
    kept_after,
    ladder,
    pools,
)
from lightning_compress.trainer.packages import MisconfigurationException


def group(size: int, rows: Any = None, name: str = "a", span: int = 1) -> engine.Group:
    """A group of one layer."""
    units = torch.arange(size).repeat_interleave(span)[:, None]
    member = engine.Member(f"{name}.weight", "out", units, (size * span, 3))
    labels = torch.zeros(size, dtype=torch.long) if rows is None else torch.tensor(rows)
    return engine.Group(name, (name,), size, (member,), None, labels, torch.arange(size))


def at(scores: Tensor, amount: float, previous: Any = None, **options: Any) -> list[bool]:
    """What stays of one group at an amount."""
    rows = options.pop("rows", None)
    one = ladder(group(len(scores), rows), scores, previous, Limits(**options))
    pool = Pool([one])
    return one.keep(int(pool.events[1][: pool.count(amount)].max()) if pool.count(amount) else 0).tolist()


@pytest.mark.parametrize(
    ("amount", "size", "removed"),
    [(0.0, 10, 0), (0.29, 10, 2), (0.29, 100, 29), (0.7, 10, 7), (0.99, 10, 9), (1.0, 10, 9), (1.0, 1, 0)],
)
def test_floor_of_the_amount_goes_and_one_stays(amount: float, size: int, removed: int) -> None:
    """floor(amount · size) units go, floating-point fuzz aside (0.29 · 100 < 29), and never all."""
    assert at(torch.arange(float(size)), amount) == [False] * removed + [True] * (size - removed)


def test_ties_go_by_position() -> None:
    """Of equal scores the first go, however many there are."""
    assert at(torch.ones(100), 0.25) == [False] * 25 + [True] * 75


def test_what_is_gone_goes_first() -> None:
    """Units that are gone go first whatever their score, and count towards the amount."""
    previous = torch.tensor([True, True, False, True])
    assert at(torch.tensor([1.0, 2.0, 9.0, 3.0]), 0.5, previous) == [False, True, False, True]


def test_rows_lose_equally_many() -> None:
    """Units of different rows go in equal numbers, each row its lowest; in each row one stays."""
    rows = [0, 1, 0, 1, 0, 1]
    scores = torch.tensor([1.0, 9.0, 2.0, 8.0, 3.0, 7.0])
    assert at(scores, 0.5, rows=rows) == [False, True, True, True, True, False]
    assert at(torch.arange(6.0), 1.0, rows=rows) == [False] * 4 + [True] * 2


def test_rows_of_unequal_length_lose_in_proportion() -> None:
    """Half of each row goes."""
    assert at(torch.arange(6.0), 0.5, rows=[0, 0, 0, 0, 1, 1]) == [False, False, True, True, False, True]


@pytest.mark.parametrize(("amount", "kept"), [(0.1, 20), (0.2, 16), (0.59, 16), (0.6, 8), (1.0, 8)])
def test_widths_are_rounded_up(amount: float, kept: int) -> None:
    """With round_to=8 a width of 20 goes to 16 and 8 only, and no further than the amount asks for."""
    assert sum(at(torch.arange(20.0), amount, round_to=8)) == kept


def test_minimum_and_most() -> None:
    """The width stays at `minimum`; no more than `most` of a group goes."""
    assert sum(at(torch.arange(20.0), 1.0, minimum=6)) == 6
    assert sum(at(torch.arange(20.0), 1.0, most=0.3)) == 14


def test_pieces_stay_multiples_each_by_itself() -> None:
    """Two pieces of 16 go to 8 each with round_to=8, not to 12 each; four groups of 4 are 16 wide and go to 8."""
    assert sum(at(torch.arange(32.0), 0.9, rows=[0] * 16 + [1] * 16, round_to=8)) == 16
    assert sum(at(torch.arange(16.0), 0.9, rows=[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, round_to=8)) == 8


def test_a_head_counts_with_its_channels() -> None:
    """A unit of 8 channels keeps the width a multiple of 8 by itself, and `minimum` is in channels."""
    one = ladder(group(4, span=8), torch.arange(4.0), None, Limits(round_to=8, minimum=9))
    assert one.stops == (0, 1, 2)


def test_a_compacted_group_goes_on_where_it_was() -> None:
    """Of 10 units 4 were removed physically: half of ten is one more."""
    pool = Pool([ladder(group(6), torch.arange(6.0), dense=10)])
    assert pool.count(0.4) == 0 and pool.count(0.5) == 1 and pool.count(1.0) == 5


def two(first: list[float], second: list[float], scope: str) -> list[tuple[float, Pool]]:
    """Two groups under a scope, both of amount 0.5."""
    ladders = [ladder(group(len(s), name=n), torch.tensor(s)) for n, s in (("a", first), ("b", second))]
    return pools(ladders, {"a": 0.5, "b": 0.5}, SCOPES[scope])


def test_global_takes_the_lowest_of_all() -> None:
    """Of eight units the lowest four go, all but one of them from one group; by group two of each go."""
    low, high = [1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 7.0]
    ((_, pool),) = two(low, high, "global")
    descent = Descent([pool])
    assert {n: k.tolist() for n, k in descent.keep(pool.count(0.5)).items()} == {
        "a": [False, False, False, True],
        "b": [False, True, True, True],
    }
    assert len(two(low, high, "group")) == 2 and len(two(low, high, "isomorphic")) == 1


def test_groups_of_other_amounts_do_not_compete() -> None:
    """Each amount has its own pool, also with global scope."""
    ladders = [ladder(group(4, name=n), torch.ones(4)) for n in ("a", "b", "c")]
    assert [len(p.ladders) for _, p in pools(ladders, {"a": 0.5, "b": 0.2, "c": 0.5}, SCOPES["global"])] == [2, 1]


def test_a_descent_goes_down_everywhere_at_once() -> None:
    """Two groups of 4 and 8 lose the same fraction at any time, and step by step only ever more."""
    ladders = [ladder(group(n, name=m), torch.arange(float(n))) for m, n in (("a", 4), ("b", 8))]
    descent = Descent([Pool([one]) for one in ladders])
    kept = [{name: int(k.sum()) for name, k in descent.keep(n).items()} for n in range(len(descent) + 1)]
    assert kept[0] == {"a": 4, "b": 8} and kept[-1] == {"a": 1, "b": 1}
    assert all(abs(k["a"] / 4 - k["b"] / 8) <= 0.25 for k in kept)
    assert all(sum(one.values()) - sum(two.values()) == 1 for one, two in zip(kept, kept[1:], strict=False))


def test_isomorphic_tells_kinds_of_groups_apart() -> None:
    """In a transformer neurons compete with neurons of all blocks, heads with heads, the token stream with nothing."""
    from torchvision.models import VisionTransformer

    net = VisionTransformer(16, 8, 2, 2, 8, 16, num_classes=3)
    groups = [g for g in engine.dependency_groups(net, torch.zeros(1, 3, 16, 16)) if g.reason is None]
    found: dict[Any, list[str]] = {}
    for one in groups:
        found.setdefault(SCOPES["isomorphic"](one), []).append(one.name.rpartition(".")[2] or one.name)
    assert sorted(map(sorted, found.values())) == [["0", "0"], ["conv_proj"], ["self_attention", "self_attention"]]


@pytest.mark.parametrize("value", [0, -8, True, 2.0])
def test_widths_are_numbers_from_one_on(value: Any) -> None:
    """The error names the argument."""
    with pytest.raises(MisconfigurationException, match="`round_to`.*got"):
        check_limits(value, 1)
    with pytest.raises(MisconfigurationException, match="`minimum`.*got"):
        check_limits(1, value)
    for some in ([value], value, "8"):
        with pytest.raises(MisconfigurationException, match="`widths` of 'a' must be .*got"):
            check_limits(1, 1, {"a": some})
    check_limits(np.int64(1), 1, {"a": np.array([4, 8])})


def test_ladder_of_a_real_grouped_convolution() -> None:
    """Both groups of a convolution lose equally many, so that it stays a grouped convolution."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 2, 1))
    one: Ladder = next(
        ladder(g, torch.arange(float(g.size)))
        for g in engine.dependency_groups(net, torch.zeros(1, 3, 4, 4))
        if g.name == "1"
    )
    assert [one.removed(stop) for stop in range(len(one.stops))] == [0, 2, 4, 6]


class Layers(nn.Module):
    """Two layers of one structure and size behind each other, and one of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers."""
        return self.net(x)


@pytest.mark.parametrize("scope", ["group", "global", "isomorphic"])
@pytest.mark.parametrize("amount", [0.5, {"net.0": 0.25, "*": 0.5}])
def test_a_bundle_keeps_equally_many_each_its_own(scope: str, amount: Any) -> None:
    """The smallest amount counts; the units are chosen by the scores of each group."""
    groups = [group for group in engine.dependency_groups(Layers(), torch.zeros(1, 3)) if group.reason is None]
    scores = {"net.0": torch.arange(8.0), "net.2": torch.arange(8.0).flip(0) * 9, "net.4": torch.arange(6.0)}
    ladders = bundled([ladder(group, scores[group.name]) for group in groups])
    amounts = {group.name: amount if isinstance(amount, float) else amount.get(group.name, 0.5) for group in groups}
    keep: dict[str, Tensor] = {}
    for part, pool in pools(ladders, amounts, SCOPES[scope]):
        keep |= kept_after(pool, pool.count(part))
    assert keep["net.0"].sum() == keep["net.2"].sum() < 8
    assert torch.equal(keep["net.0"], keep["net.2"].flip(0))
    if scope == "group":
        assert keep["net.0"].sum() == (4 if amount == 0.5 else 6) and keep["net.4"].sum() == 3
