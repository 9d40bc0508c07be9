"""Layers whose short output is spread over the channels that others keep: exactly, and as an ordinary module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compaction import spreading
from engine.errors import PlanError
from engine.surgery.exchange import Change
from engine.surgery.kinds.spread import Spread
from tests.engine.attentions import stored
from tests.engine.exactness import KINDS, Masks, masked, norm_outputs, parameters, randomised, relative_error, run
from tests.engine.nets import snapshot, unchanged


class Residual(nn.Module):
    """Two branches that are added to a stream, in front of a head.

    Args:
        norms: whether a batch norm stands behind each convolution.
    """

    def __init__(self, norms: bool = True) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8) if norms else nn.Identity()
        self.one, self.one_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8) if norms else nn.Identity()
        self.two, self.two_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8) if norms else nn.Identity()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.one_norm(self.one(x)))
        x = torch.relu(x + self.two_norm(self.two(x)))
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """A layer beside a residual over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down, self.head = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores per token."""
        x = self.embed(x)
        return self.head(x + self.down(torch.relu(self.up(x))))


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LARGER = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def contradicting(model: nn.Module, betas: bool) -> Masks:
    """Each layer keeps other channels; what a norm adds is masked too, or not."""
    masks: Masks = {}
    for number, name in enumerate(("stem", "one", "two")):
        kept = (torch.arange(8) + number) % 3 > 0
        weight = getattr(model, name).weight
        masks[name] = {"weight": kept.view(-1, 1, 1, 1).expand_as(weight), "bias": kept}
        norm = "norm" if name == "stem" else f"{name}_norm"
        if betas and isinstance(getattr(model, norm), nn.BatchNorm2d):
            masks[norm] = {"weight": kept, "bias": kept}
    return masks


def reindexed(model: nn.Module, masks: Masks, x: Tensor) -> tuple[nn.Module, engine.Plan]:
    """Compact a copy, with layers set apart."""
    speedup = engine.ModelSpeedup(copy.deepcopy(model), x, masks, confidence=2, reindex=True)
    return speedup.speedup_model(), speedup.plan


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "PAYS", 0.0)


@pytest.mark.parametrize("betas", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_contradicting_masks(norms: bool, betas: bool) -> None:
    """Every layer loses what is masked in it, zero or constant; without, what any keeps stays in all."""
    model = randomised(Residual(norms))
    masks = contradicting(model, betas)
    small, plan = reindexed(model, masks, IMAGE)
    assert [len(p) for p in (small.one.weight, small.two.weight)] == [6, 5]
    for x in (IMAGE, LARGER):
        assert relative_error(run(masked(model, masks), x), run(small, x)) < 1e-9
    plain = engine.ModelSpeedup(copy.deepcopy(model), IMAGE, masks).speedup_model()
    assert parameters(small) < parameters(plain)
    layers = {"norm", "one_norm", "two_norm"} if norms else {"stem", "one", "two"}
    assert {layer.module for layer in plan.of(Spread)} == layers
    assert any(layer.fill.any() for layer in plan.of(Spread)) == (norms and not betas)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norms", [False, True])
def test_any_masks(norms: bool, kind: str) -> None:
    """Exact, and never larger than without."""
    model = randomised(Residual(norms))
    masks = KINDS[kind](model, 1)
    small, _ = reindexed(model, masks, IMAGE)
    plain = engine.ModelSpeedup(copy.deepcopy(model), IMAGE, masks).speedup_model()
    assert relative_error(run(masked(model, masks), LARGER), run(small, LARGER)) < 1e-9
    before, after = (engine.count_flops_params(m, IMAGE, verbose=False)[:2] for m in (plain, small))
    assert after[0] <= before[0] and after[1] <= before[1]


def test_tokens() -> None:
    """The channels are the last dimension there."""
    model = randomised(Tokens())
    kept = torch.arange(8) > 4
    masks = {"down": {"weight": kept[:, None].expand(8, 12), "bias": kept}}
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    small, plan = reindexed(model, masks, x)
    assert small.down.weight.shape == (3, 12) and plan.of(Spread)[0].dim == 2
    assert relative_error(run(masked(model, masks), x), run(small, x)) < 1e-9


def test_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, three eighths are masked, and what is left reads 8 channels at 9 places: 27 per entry; of one, 18."""
    model = randomised(Residual())
    masks = contradicting(model, True)
    monkeypatch.setattr(spreading, "PAYS", 20.0)
    assert [layer.module for layer in reindexed(model, masks, IMAGE)[1].of(Spread)] == ["two_norm"]
    monkeypatch.setattr(spreading, "PAYS", 100.0)
    assert reindexed(model, masks, IMAGE)[1].of(Spread) == ()


def test_it_trains_and_exports() -> None:
    """The certificate says whether train mode is exact; gradients flow; `torch.export` takes it."""
    model = randomised(Residual())
    for betas in (True, False):
        speedup = engine.ModelSpeedup(copy.deepcopy(model), IMAGE, contradicting(model, betas), reindex=True)
        small = speedup.speedup_model()
        assert speedup.certificate.exact_in_train is betas
    program = torch.export.export(small, (IMAGE,)).module()
    assert relative_error(run(small, IMAGE), [program(IMAGE).detach()]) < 1e-12
    torch.autograd.backward(small.train()(IMAGE).sum())
    assert small.one.weight.grad.any()


def test_files_copies_and_pickles() -> None:
    """The plan makes the same module of a fresh one; state-dict keys stay; copies and pickles compute the same."""
    model = randomised(Residual())
    small, plan = reindexed(model, contradicting(model, False), IMAGE)
    fresh = stored(plan).apply(randomised(Residual(), seed=1))
    assert list(fresh.state_dict()) == list(model.state_dict())
    fresh.load_state_dict(small.state_dict())
    for other in (fresh, copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert relative_error(run(small, IMAGE), run(other, IMAGE)) == 0.0
    assert "the output of one_norm to 8 channels" in str(plan)


def test_once_more() -> None:
    """A second compaction is exact; a plan that spreads an output twice is refused, and nothing changes."""
    model = randomised(Residual())
    small, plan = reindexed(model, contradicting(model, True), IMAGE)
    masks = {"one": {"weight": torch.zeros_like(small.one.weight), "bias": torch.zeros_like(small.one.bias)}}
    expected = run(masked(small, masks), LARGER)
    again = engine.ModelSpeedup(small, IMAGE, masks, reindex=True).speedup_model()
    assert relative_error(expected, run(again, LARGER)) < 1e-9
    before = snapshot(small)
    with pytest.raises(PlanError, match="'norm' is spread already"):
        engine.Plan(exchanges=plan.of(Spread)).apply(small)
    assert unchanged(small, before)


def test_a_damaged_table() -> None:
    """It is refused."""
    spread = Spread.of("a", 1, torch.tensor([True, False]), torch.tensor([True, True]), torch.tensor([0.0, 2.0]))
    assert spread is not None and spread.table.tolist() == [0, 1] and spread.fill.tolist() == [2.0]
    assert Spread.from_state_dict(spread.state_dict()).table.tolist() == [0, 1]
    for damage in ({"table": torch.tensor([0, 2])}, {"table": torch.tensor([-1])}, {"fill": torch.zeros(0)}):
        with pytest.raises(PlanError, match="'a' is damaged"):
            Spread.from_state_dict(spread.state_dict() | damage)


def test_taken_back() -> None:
    """The layer is as it was."""
    model = Residual()
    before = list(vars(model.one)), list(model.one._buffers), type(model.one)
    change = Change(model)
    Spread("one", 1, 8, torch.arange(8), torch.zeros(1, dtype=torch.float64)).prepare(change)
    change.commit()
    assert norm_outputs(model.eval(), IMAGE.float())
    change.rollback()
    assert (list(vars(model.one)), list(model.one._buffers), type(model.one)) == before


def test_spread_again_after_growing_back() -> None:
    """A network that grew back for its old weights can be compacted in the same way once more."""
    model = randomised(Residual())
    masks, weights = contradicting(model, True), copy.deepcopy(model.state_dict())
    small = engine.ModelSpeedup(model, IMAGE, masks, reindex=True).speedup_model()
    expected = run(small, LARGER)
    with pytest.warns(UserWarning, match="grows back"):
        small.load_state_dict(weights)
    again = engine.ModelSpeedup(small, IMAGE, masks, reindex=True).speedup_model()
    assert relative_error(expected, run(again, LARGER)) == 0.0
