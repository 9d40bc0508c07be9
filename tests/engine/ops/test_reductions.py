"""Reductions over positions and channels, against running them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.surgery.kinds.pins import Pinned
from tests.engine.exactness import check_exact, masked, randomised
from tests.engine.nets import Net, dead, image
from tests.engine.norms_by_hand import NORMS, Normalised
from tests.engine.ops.brute import check_constants, check_labels


def test_a_sum_over_positions_gives_a_profile() -> None:
    """It multiplies each constant by the number of positions, which another resolution changes."""
    check_constants(lambda x: x.sum((2, 3), keepdim=True), constant=[0, 1, 2, 3])
    check_labels(lambda x: x.sum((2, 3), keepdim=True), classes=8)


def test_extremes_of_channels_freeze_them() -> None:
    """The largest of channels may be one that goes."""
    check_labels(lambda x: x.amax(1), classes=0)
    check_labels(lambda x: x.amax((1, 2)), classes=0)


class RootMeanSquare(nn.Module):
    """An RMS norm over channels, by hand."""

    def __init__(self, kind: str = "method") -> None:
        super().__init__()
        self.stem, self.head, self.kind = nn.Conv2d(3, 8, 1), nn.Linear(8, 2), kind

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.stem(x)
        if self.kind == "method":
            x = x * (x.pow(2).mean(1, keepdim=True) + 0.1).rsqrt()
        elif self.kind == "function":
            x = x * torch.mean(x * x, 1, keepdim=True)
        elif self.kind == "sum":
            x = x / (1 + x.abs().sum(1, keepdim=True))
        else:
            mean = functools.partial(torch.mean, dim=1, keepdim=True)
            x = x * mean(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("kind", ["method", "function", "sum"])
def test_zeros_go_from_a_mean_over_channels(kind: str) -> None:
    """A mean goes on dividing by as many as there were; twice in a row, and after a look at the disk."""
    model = randomised(RootMeanSquare(kind))
    assert [g.reason for g in engine.dependency_groups(model, image())][0] is None
    masks = dead(model, {"stem": [0, 1, 5]}, bias=True)
    plan = check_exact(model, masks, image(), image(9, batch=3))
    assert plan.slices["stem.weight"].shape[0] == 5 and bool(plan.of(Pinned)) == (kind != "sum")
    small = plan.apply(copy.deepcopy(model))
    again = check_exact(small, dead(small, {"stem": [2]}, bias=True), image(), image(7))
    assert again.slices["stem.weight"].shape[0] == 4


def test_a_mean_keeps_constants() -> None:
    """A dead channel with a bias has its share in the mean: it stays."""
    model = randomised(RootMeanSquare())
    plan = check_exact(model, dead(model, {"stem": [0, 1, 5]}), image(), image(9))
    assert "stem.weight" not in plan.slices


def test_a_mean_whose_call_cannot_be_edited_freezes() -> None:
    """The reason names the line."""
    unsafe = engine.not_safe_to_prune(randomised(RootMeanSquare("partial")), image())
    assert list(unsafe) == ["stem"] and "test_reductions.py:" in unsafe.reasons["stem"]


def test_a_layer_norm_by_hand_freezes() -> None:
    """Behind ``x - x.mean(1)`` nothing is zero any more, so that no channel could ever go."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x - x.sum(1, keepdim=True) / 8
        x = x / (0.1 + x.pow(2).sum(1, keepdim=True) / 8).sqrt()
        return m.head(x.mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    group = engine.dependency_groups(model, image())[0]
    assert group.reason is not None and "not zero there" in group.reason


def without(model: nn.Module, stream: list[int], neurons: list[int]) -> dict[str, dict[str, Tensor]]:
    """Masks of channels of the stream, in the norms too, and of neurons."""
    masks = dead(model, {"stem": stream, "branch.2": stream, "branch.0": neurons}, bias=True)
    for name in ("first", "last"):
        parameters = dict(model.get_submodule(name).named_parameters())
        keep = torch.ones_like(parameters["weight"]).index_fill(0, torch.tensor(stream), 0)
        masks[name] = dict.fromkeys(parameters, keep)
    return masks


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norms_by_hand(norm: type[nn.Module]) -> None:
    """Behind ``x - x.mean(1)`` nothing is zero any more, but scales of zero follow; twice in a row."""
    model = randomised(Normalised(norm))
    assert [group.reason for group in engine.dependency_groups(model, image())[:-1]] == [None, None]
    plan = check_exact(model, without(model, [0, 1, 5], [2, 4]), image(), image(9, batch=3))
    assert plan.slices["stem.weight"].shape[0] == 5 and plan.slices["branch.0.weight"].shape[0] == 4
    small = plan.apply(copy.deepcopy(model))
    again = check_exact(small, without(small, [3], [0]), image(), image(7))
    assert again.slices["stem.weight"].shape[0] == 4


def test_a_spread_of_complex_numbers_freezes() -> None:
    """It is the mean of absolute squares, and is not rewritten."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        spread = x.to(torch.complex128).mul(1 + 2j).var(1, keepdim=True, unbiased=False)
        return m.head((m.scale * x * spread.rsqrt()).mean((2, 3)))

    layers = {"stem": nn.Conv2d(3, 8, 1), "head": nn.Linear(8, 2)}
    model = randomised(Net(forward, **layers))
    model.register_parameter("scale", nn.Parameter(torch.rand(8, 1, 1, dtype=torch.float64)))
    reasons = [group.reason or "" for group in engine.dependency_groups(model, image())]
    assert any("runs over it" in reason for reason in reasons), reasons


def deviation(x: Tensor) -> Tensor:
    """A function that several calls share."""
    return x / (0.1 + x.std(1, keepdim=True))


class SharedFunction(nn.Module):
    """Two layers whose outputs the same function divides by their deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of scores."""
        return self.head(torch.cat([deviation(self.one(x)), deviation(self.other(x))], 1))


def test_a_statistic_of_calls_that_lose_different_channels_stays() -> None:
    """It would cancel where a call loses none; where both lose as many, channels are removed."""
    model = randomised(SharedFunction())
    plan = check_exact(model, dead(model, {"one": [0, 1]}, bias=True), image(), image(9))
    assert "one.weight" not in plan.slices
    plan = check_exact(model, dead(model, {"one": [0, 1], "other": [5, 7]}, bias=True), image(), image(9))
    assert plan.slices["one.weight"].shape[0] == plan.slices["other.weight"].shape[0] == 6


def test_norms_by_hand_whose_scales_stay() -> None:
    """What a norm returns for a masked channel is read, unless the norm's scale is masked too."""
    model = randomised(Normalised(NORMS[0]))
    plan = check_exact(model, dead(model, {"stem": [0, 1], "branch.2": [0, 1]}, bias=True), image(), image(9))
    assert "stem.weight" not in plan.slices


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norms_by_hand_in_single_precision(norm: type[nn.Module]) -> None:
    """Where the mean is large, one removed channel leaves more than the subtraction cancels."""
    model = randomised(Normalised(norm), dtype=torch.float32)
    masks = without(model, [0], [1])
    with torch.no_grad():
        model.stem.bias += 30
        batches = [
            torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((2, 3, 6, 6), (3, 3, 9, 9))
        ]
        plan = engine.ModelSpeedup(model, batches[0], masks).plan
        small = plan.apply(copy.deepcopy(model))
        exact = masked(model, masks).double()
        for batch in batches:
            expected = exact(batch.double())
            error = (small(batch) - expected).abs().max() / expected.abs().max()
            assert len(small.stem.weight) == 7 and error < 1e-5


def test_reductions_drop_their_dimensions() -> None:
    """Without ``keepdim`` the channels move to the last place."""
    check_labels(lambda x: x.mean((2, 3)), classes=8)
    check_labels(lambda x: x.mean((-1, 0)), classes=8)


@pytest.mark.parametrize(
    ("reduction", "size"),
    [
        (lambda h: h.std(2), 4),
        (lambda h: h.var(2, correction=0), 4),
        (lambda h: torch.var_mean(h, 2)[0], 4),
        (lambda h: torch.std_mean(h, 2)[1], 4),
        (lambda h: h.norm(dim=2), 4),
        (lambda h: torch.linalg.vector_norm(h, 1, 2), 4),
        (lambda h: h.logsumexp(2), 8),  # of zeros it is the logarithm of their number
        (lambda h: h.prod(2), 8),  # of none it is one
    ],
)
def test_zeros_over_positions(reduction: Callable[[Tensor], Tensor], size: int) -> None:
    """Statistics of a channel of zeros are zero, whatever the number of positions: it goes."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(reduction(torch.relu(m.stem(x)).flatten(2)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1, 4, 5]}, bias=True), image(), image(9, batch=3))
    assert ("stem.weight" in plan.slices) is (size == 4)
    assert size == 8 or plan.slices["stem.weight"].shape[0] == 4


def test_the_spread_of_constants_is_unknown() -> None:
    """It is zero but for rounding, by which code may divide."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(m.stem(x).flatten(2).std(2))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1]}), image(), image(9))
    assert "stem.weight" not in plan.slices
