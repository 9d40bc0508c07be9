"""Decisions on numbers that are equal up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compaction.folds import Fold
from engine.errors import VerificationError
from engine.verification.decisions import Decision, Decisions, decides
from tests.engine.exactness import randomised
from tests.engine.nets import Net, dead, image


def ranking(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """Order positions by a score that differs in the last digits only, and pick the pixels there."""
    digits = torch.frac(1e14 * m.head(torch.sigmoid(m.stem(x)).flatten(2).transpose(1, 2)))[..., 0]
    scores = 1 + 1e-12 * digits
    order = scores.sort(dim=1, descending=True).indices
    return scores.gather(1, order), x.flatten(2)[:, 0].gather(1, order)


def ranked() -> nn.Module:
    """A network whose order hangs on the last digit."""
    return randomised(Net(ranking, stem=nn.Conv2d(3, 64, 3, padding=1), head=nn.Linear(64, 1)))


def test_an_order_that_hangs_on_rounding_is_not_compared() -> None:
    """Positions with the same score may change places; the same network without these decisions is refused."""
    model, x = ranked(), image(16)
    masks = dead(model, {"stem": range(1, 64, 2)})
    engine.ModelSpeedup(model, x, masks, confidence=2).speedup_model()
    assert model.stem.out_channels == 32


def test_that_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without repeating decisions the order differs."""
    monkeypatch.setattr(Decision, "on_the_same", lambda *a: False)
    model, x = ranked(), image(16)
    with pytest.raises(VerificationError, match="at the output"):
        engine.ModelSpeedup(model, x, dead(model, {"stem": range(1, 64, 2)}), confidence=2).speedup_model()


def test_a_wrong_number_in_front_of_a_decision_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of the largest score is compared, and scores that differ are ranked anew."""

    def best(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.sigmoid(m.stem(x)).mean((2, 3))).argmax(1)

    model = randomised(Net(best, stem=nn.Conv2d(3, 8, 3, padding=1), head=nn.Linear(8, 50)))
    monkeypatch.setattr(Fold, "apply", lambda self, t: t)
    with pytest.raises(VerificationError):
        engine.ModelSpeedup(model, image(), dead(model, {"stem": range(4)}), confidence=8).speedup_model()


def test_what_decides() -> None:
    """Whole numbers and truth values made of floating ones; no views, no writes, no sums."""
    x, flags = torch.rand(4), torch.ones(4, dtype=torch.bool)
    assert [t is x for t in decides((x, 0.5), {}, x > 0.5)] == [True]
    assert decides((x,), {}, x.argmax()) and decides((x, 2), {}, x.topk(2)) and decides((x,), {}, x.nonzero())
    assert not decides((x, x), {}, x + x)
    assert not decides((flags,), {}, ~flags)
    bits = x.view(torch.int32)
    assert not decides((x,), {}, bits)
    assert not decides((torch.zeros(0),), {}, torch.zeros(0) > 0)


def test_decisions_are_repeated_on_the_same_numbers_only() -> None:
    """Up to the tolerance, with equal infinities, at the same call of the same op and shape."""
    x = torch.tensor([1.0, 1.0 + 1e-7, -torch.inf])
    first = Decisions()
    order = first.settle("argsort", (x,), {}, x.argsort())
    near, far = torch.tensor([1.0 + 1e-6, 1.0, -torch.inf]), torch.tensor([2.0, 1.0, -torch.inf])
    for y, op, same in [
        (near, "argsort", True),
        (far, "argsort", False),
        (near, "sort", False),
        (near[:2], "argsort", False),
    ]:
        own = y.argsort()
        found = Decisions(first.taken, 1e-5).settle(op, (y,), {}, own)
        assert torch.equal(found, order if same else own), (y, op)
    again = Decisions(first.taken, 1e-5)
    again.settle("argsort", (near,), {}, near.argsort())
    assert torch.equal(again.settle("argsort", (near,), {}, near.argsort()), near.argsort())  # there was one call only


def test_recorded_tensors_are_copies() -> None:
    """The model may write into what it was given, in either run."""
    x = torch.rand(3)
    first = Decisions()
    flags = first.settle("gt", (x, 0.5), {}, x > 0.5)
    expected = flags.clone()
    flags.fill_(True)
    x_again = first.taken[0].inputs[0].clone()
    x.zero_()
    for _ in range(2):
        found = Decisions(first.taken, 0.0).settle("gt", (x_again, 0.5), {}, x_again > 0.5)
        assert torch.equal(found, expected)
        found.fill_(False)
