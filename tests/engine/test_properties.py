"""Random networks under random masks compact exactly, whatever they are made of."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine
from tests.engine.exactness import KINDS, check_exact, masked, parameters, randomised, relative_error, run
from tests.engine.random_nets import BUILDERS, SIZE, RandomNet, Step
from tests.engine.recurrent_nets import recurrent_masks, recurrent_net

STEP = st.builds(
    Step,
    op=st.sampled_from(sorted(BUILDERS)),
    first=st.integers(-3, -1),
    second=st.integers(-6, -1),
    variant=st.integers(0, 30),
)


@given(
    steps=st.lists(STEP, min_size=1, max_size=9),
    flat=st.booleans(),
    kind=st.sampled_from(sorted(KINDS)),
    repaired=st.sampled_from([None, "union", "intersection", "score"]),
    seed=st.integers(0, 5),
)
def test_random_networks_compact_exactly(
    steps: list[Step], flat: bool, kind: str, repaired: str | None, seed: int
) -> None:
    """Masked and compacted agree to 1e-9 in float64 on any network of these ops; nothing is refused."""
    torch.manual_seed(seed)
    model = randomised(RandomNet(steps, flat), seed)
    example = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    masks = KINDS[kind](model, seed)
    before = copy.deepcopy(masks)
    if repaired is not None:
        masks = engine.fix_mask_conflict(masks, model, example, repaired)
    check_exact(model, masks, example, torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64))
    assert all(
        torch.equal(m, before[k][n]) for k, e in before.items() for n, m in KINDS[kind](model, seed)[k].items() if e
    )


@given(steps=st.lists(STEP, min_size=1, max_size=9), kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 5))
def test_random_networks_with_layers_set_apart(steps: list[Step], kind: str, seed: int) -> None:
    """Spreading short outputs out again is exact on any network, and never makes it larger."""
    torch.manual_seed(seed)
    model = randomised(RandomNet(steps, False), seed)
    example = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    masks = KINDS[kind](model, seed)
    small = {apart: copy.deepcopy(model) for apart in (False, True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.compaction.spreading.PAYS", 0.0)
        for apart, copied in small.items():
            engine.ModelSpeedup(copied, example, masks, confidence=2, reindex=apart).speedup_model()
    other = torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64)
    assert relative_error(run(masked(model, masks), other), run(small[True], other)) <= 1e-9
    assert parameters(small[True]) <= parameters(small[False])


@given(steps=st.lists(STEP, min_size=1, max_size=6), seed=st.integers(0, 3))
def test_a_failed_compaction_leaves_the_model_bit_for_bit(steps: list[Step], seed: int) -> None:
    """An error after the change has begun puts back weights, shapes and attributes."""
    torch.manual_seed(seed)
    model = randomised(RandomNet(steps, False), seed)
    example = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    speedup = engine.ModelSpeedup(model, example, KINDS["channels"](model, seed))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    text = repr(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.verification.proof.check_shapes", _fail)
        try:
            speedup.speedup_model()
        except engine.errors.VerificationError:
            assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
            assert repr(model) == text
        else:
            assert speedup.plan.is_empty


def _fail(*args: object) -> None:
    raise engine.errors.VerificationError("on purpose")


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 80))])
def test_recurrent_networks(seed: int) -> None:
    """Any layer, any masks, repaired or not: the same function at another length and batch size."""
    model = recurrent_net(seed)
    masks = recurrent_masks(model, seed)
    x, other = (torch.randn(n, t, 3, generator=torch.Generator().manual_seed(t)).double() for n, t in ((2, 4), (3, 6)))
    check_exact(model, masks, x, other)
    policy = ["union", "intersection", "score"][seed % 3]
    check_exact(model, engine.fix_mask_conflict(masks, model, x, policy=policy), x)
