"""Plans that stand for more than they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.compaction.plan import Plan
from engine.compaction.reading import check_plans
from engine.compaction.slices import Slice
from engine.errors import PlanError

EMPTY = Plan().state_dict()
BITS = torch.full((2**16,), 255, dtype=torch.uint8)


def with_cut(count: int = 1, **cut: Any) -> dict[str, Any]:
    """A plan with a cut."""
    return {**EMPTY, "slices": {"w": {"before": [4], "cuts": [{"dims": [0], "sizes": [2], **cut}] * count}}}


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([EMPTY] * 20_000, "20000 plans"),
        ([{**EMPTY, "notes": ["a"] * 20_000}], "20000 notes"),
        ([{**EMPTY, "pins": [{}] * 20_000}], "20000 pins"),
        ([with_cut(200_000, index=torch.tensor([0, 1]))], "500000 parts"),
        ([with_cut(bits=BITS.clone()) for _ in range(40)], "more memory than the file"),
        ([with_cut(index=torch.zeros(1, dtype=torch.int64).expand(10**9))], "claims 1000000000 entries"),
        ([with_cut(index=torch.ones(2))], "float32"),
        ([{**EMPTY, "exchanges": [{"fill": torch.zeros(1)}]}], "'fill' is a tensor of torch.float32"),
        ([{**EMPTY, "attributes": {"a": {"b": 2**70}}}], "71 bits"),
    ],
)
def test_refused(plans: list[Any], message: str) -> None:
    """By name, before anything is unpacked."""
    with pytest.raises(PlanError, match=message):
        check_plans(plans, 10_000)


def test_the_same_set_counts_once() -> None:
    """As it is unpacked once, and stored once."""
    check_plans([with_cut(bits=BITS) for _ in range(100)], 10_000)


def test_a_set_is_unpacked_once() -> None:
    """A thousand cuts of a plan that refer to one set work with one tensor."""
    state = Slice.along(0, torch.arange(0, 2000, 2), (2000,)).state_dict()
    plan = Plan.from_state_dict({**EMPTY, "slices": {str(n): state for n in range(1000)}})
    assert len({id(cut.cuts[0].index) for cut in plan.slices.values()}) == 1


def test_twice() -> None:
    """No module is changed twice in one way."""
    norm = {"kind": "norm", "module": "a", "size": 4, "kept": 2, "fill": None, "groups": 1, "plain": False}
    with pytest.raises(PlanError, match="two exchanges of the kind 'norm' for 'a'"):
        Plan.from_state_dict({**EMPTY, "exchanges": [norm, norm]})
