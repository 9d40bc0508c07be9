"""Rows that are written where a mask is true, against running the op."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import masked, randomised, relative_error, run
from tests.engine.ops.brute import check_constants, check_labels, check_use


def words(x: Tensor) -> Tensor:
    """Positions, and channels last."""
    return x.flatten(2).transpose(1, 2)


def places(x: Tensor) -> Tensor:
    """Every third position."""
    return x.new_ones(len(x), x.shape[2] * x.shape[3], 1).cumsum(1) % 3 == 1


def written(mask: Callable[[Tensor], Tensor], source: Callable[[Tensor], Tensor] = words) -> Callable[[Tensor], Tensor]:
    """Return a function that writes into words and returns them with channels first."""
    return lambda x: words(x).masked_scatter(mask(x), source(x)).transpose(1, 2)


LABELS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "expanded": (written(lambda x: places(x).expand_as(words(x))), 8),
    "inverted": (written(lambda x: ~places(x).expand(words(x).shape)), 8),
    "one wide": (written(places), 8),
    "rows": (written(places, lambda x: words(x).flatten(0, 1)), 8),
    "of a number": (written(lambda x: words(x) > 0), 0),
    "channels first": (lambda x: x.flatten(2).masked_scatter(places(x).transpose(1, 2), x.flatten(2)), 0),
    "another width": (written(places, lambda x: words(x).reshape(-1, 4)), 0),
    "numbers in a row": (written(places, lambda x: words(x).flatten()), 0),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name: str) -> None:
    """Channels pass where a mask is the same for all of them; elsewhere the source is read across channels."""
    f, classes = LABELS[name]
    check_labels(f, classes, positions=False)


def test_constants() -> None:
    """A channel that is dead in both stays so."""
    check_constants(LABELS["expanded"][0], [0, 1, 2, 3])
    check_constants(written(places, lambda x: words(x) + 1), [])


@pytest.mark.parametrize("name", [name for name, (_, classes) in LABELS.items() if classes])
def test_use(name: str) -> None:
    """A channel without influence has none before the op either."""
    check_use(lambda x: LABELS[name][0](x)[..., None], [1, 6], [1, 6])


class Multimodal(nn.Module):
    """Words, of which those with a certain number are places for what is computed of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.vision, self.project = nn.Embedding(20, 12), nn.Conv2d(3, 8, 2, stride=2), nn.Linear(8, 12)
        self.inner, self.outer, self.norm, self.head = (
            nn.Linear(12, 16),
            nn.Linear(16, 12),
            nn.LayerNorm(12),
            nn.Linear(12, 5),
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return numbers for each word."""
        ids, picture = batch
        h, features = self.embed(ids), self.project(self.vision(picture).relu().flatten(2).transpose(1, 2))
        mask = (ids == 7).unsqueeze(-1).expand_as(h).to(h.device)
        h = h.masked_scatter(mask, features.to(h.dtype))
        return self.head(self.norm(h + self.outer(self.inner(h).relu())))


def test_a_model_of_words_and_pictures() -> None:
    """The stream, what the encoder of pictures puts into it, and all layers inside lose channels."""
    model = randomised(Multimodal())
    ids = torch.tensor([[1, 7, 7, 7, 7, 3], [7, 7, 7, 2, 7, 5]])
    example = ((ids, torch.randn(2, 3, 4, 4, dtype=torch.float64)),)
    other = (ids.flip(1), torch.randn(2, 3, 4, 4, dtype=torch.float64))
    stream = next(
        g for g in engine.dependency_groups(model, example) if any(m.parameter == "embed.weight" for m in g.members)
    )
    assert stream.reason is None and any(m.parameter == "project.weight" for m in stream.members)
    groups = [g for g in engine.dependency_groups(model, example) if g.reason is None]
    masks = engine.group_masks(groups, {g.name: torch.arange(g.size) % 2 == 0 for g in groups})
    reference, compacted = masked(model, masks), copy.deepcopy(model)
    engine.ModelSpeedup(compacted, example, masks, confidence=2).speedup_model()
    assert compacted.embed.weight.shape[1] == compacted.project.out_features == 6
    for batch in (example[0], other):
        assert relative_error(run(reference, batch), run(compacted, batch)) < 1e-9
