"""Which sizes trials vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.alternatives.axes import Axis
from engine.ops import RULES
from engine.verification.resizing import Sizes
from tests.engine.nets import Net, dead


def tried(model: nn.Module, example: Any, accepts: Callable[[dict[str, int]], bool], **options: Any) -> list[Any]:
    """Return the sizes that are tried, by dimension, where a model accepts some."""
    seen: list[dict[str, int]] = []

    def attempt(sizes: Mapping[Axis, int]) -> bool:
        seen.append({"batch" if axis.batch else str(axis): n for axis, n in sizes.items()})
        return accepts(seen[-1])

    Sizes.of(engine.trace(model, example, **options), RULES, 0, True).explore(attempt, False)
    return seen


HEIGHT, WIDTH = "dimension 2 of input 0", "dimension 3 of input 0"


def test_pictures() -> None:
    """Odd and smaller along both sides, not alike, then larger; a smaller multiple where that is rejected."""
    model, example = nn.Conv2d(3, 4, 1), torch.zeros(2, 3, 8, 8)
    first = {"batch": 1, HEIGHT: 5, WIDTH: 7}
    assert tried(model, example, lambda sizes: True) == [first, {"batch": 1, HEIGHT: 19, WIDTH: 17}]
    even = tried(model, example, lambda sizes: not any(n % 2 for name, n in sizes.items() if name != "batch"))
    assert even == [first, {"batch": 1, WIDTH: 4}]
    assert tried(model, example, lambda sizes: len(sizes) == 1) == [first, {"batch": 1, WIDTH: 4}, {"batch": 1}]
    narrow = tried(model, example, lambda sizes: sizes[WIDTH] < 12)
    assert narrow == [first, {"batch": 1, HEIGHT: 19, WIDTH: 17}, {"batch": 1, HEIGHT: 5, WIDTH: 9}]
    large = tried(model, torch.zeros(2, 3, 224, 224), lambda sizes: len(sizes) == 2)
    assert large[0] == {"batch": 1, HEIGHT: 141, WIDTH: 143} and large[1] == {"batch": 1, WIDTH: 192}


def test_features_stay() -> None:
    """What a layer contracts or normalises is of one size."""
    for layer in (nn.Linear(3, 4), nn.LayerNorm(3)):
        sizes = tried(layer, torch.zeros(2, 8, 3), lambda sizes: True)
        assert sizes == [{"batch": 1, "dimension 1 of input 0": 5}, {"batch": 1, "dimension 1 of input 0": 17}]
    assert tried(nn.Linear(3, 4), torch.zeros(2, 3), lambda sizes: True) == [{"batch": 1}]


def test_tokens() -> None:
    """Whole numbers are sequences as well; where all together are rejected, steps are tried alone."""
    steps = "dimension 1 of input 0"
    sizes = tried(nn.Embedding(3, 4), torch.zeros(2, 8, dtype=torch.long), lambda sizes: True)
    assert sizes == [{"batch": 1, steps: 5}, {"batch": 1, steps: 17}]
    lstm = tried(nn.LSTM(6, 4, batch_first=True), torch.zeros(2, 8, 6), lambda s: "dimension 2 of input 0" not in s)
    assert lstm[-2:] == [{"batch": 1, steps: 5}, {"batch": 1, steps: 17}]


def test_only_what_is_dynamic_varies() -> None:
    """As `dynamic_dims` says."""
    model, example = nn.Conv2d(3, 4, 1), torch.zeros(2, 3, 8, 8)
    assert tried(model, example, lambda sizes: True, dynamic_dims=({3},)) == [{WIDTH: 5}, {WIDTH: 17}]
    assert tried(model, example, lambda sizes: True, dynamic_dims=(None,)) == []


@pytest.mark.parametrize(
    ("dims", "shapes"),
    [
        (({0, 3},), ((4, 3, 8, 8), (1, 3, 8, 5), (1, 3, 8, 17))),
        (({2},), ((4, 3, 8, 8), (2, 3, 5, 8), (2, 3, 17, 8))),
        (({0},), ((4, 3, 8, 8), (1, 3, 8, 8))),
    ],
)
def test_the_certificate_keeps_to_them(dims: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    """The larger run as well."""
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1))
    example = torch.rand(2, 3, 8, 8)
    graph = engine.trace(model, example, dynamic_dims=dims)
    speedup = engine.ModelSpeedup(model, example, dead(model, {"0": [0]}), confidence=4, graph=graph)
    speedup.speedup_model()
    assert speedup.certificate.shapes == shapes and speedup.certificate.verified


def test_what_is_not_finite_at_another_size_is_said() -> None:
    """A mean over no tokens is not a reason to refuse."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.stem(x).relu()
        return m.head(y + y[:, 6:].mean(1, keepdim=True))

    model = Net(forward, stem=nn.Linear(3, 6), head=nn.Linear(6, 2))
    speedup = engine.ModelSpeedup(model, torch.rand(2, 8, 3), dead(model, {"stem": [0]}), confidence=2)
    speedup.speedup_model()
    assert speedup.certificate.verified and any("not finite" in note for note in speedup.certificate.notes)


class Folds(nn.Module):
    """Flattens pictures by a fixed width, as Q networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.head, self.width = nn.Conv2d(2, 8, 3, 2), nn.Linear(128, 6), nn.Linear(6, 3), 128

    def forward(self, x: Tensor) -> Tensor:
        """(N, 2, 9, 9) -> (N, 3)."""
        return self.head(self.hidden(torch.relu(self.conv(x)).view(-1, self.width)).relu())  # type: ignore[no-any-return]


def test_a_size_that_makes_several_samples_of_one() -> None:
    """No model is meant to take a picture that is four; the certificate says that it was not compared."""
    model, x = Folds().double().eval(), torch.randn(2, 2, 9, 9, dtype=torch.float64)
    assert model(torch.randn(1, 2, 18, 18, dtype=torch.float64)).shape == (4, 3)
    speedup = engine.ModelSpeedup(model, x, dead(model, {"conv": [0, 1, 5], "hidden": [2]}, bias=True))
    small = speedup.speedup_model()
    assert small.hidden.weight.shape == (5, 80)
    assert any("a different number of samples" in note for note in speedup.certificate.notes)
