"""What networks return, and what they leave behind: endings of a network, each given features and scores."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.random_traps.blocks import Block, block, layer, positions

__all__ = ["ENDINGS", "Ending"]

Pair = namedtuple("Pair", "scores features")


@dataclass
class Output:
    """A result in fields."""

    scores: Tensor
    features: Any = None
    loss: Any = None


class Slots:
    """A result in slots."""

    __slots__ = ("features", "scores")

    def __init__(self, scores: Tensor, features: Tensor) -> None:
        self.scores, self.features = scores, features


class Ending(nn.Module):
    """Returns the scores.

    Args:
        width: of the features.
    """

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, features: Tensor, scores: Tensor) -> Any:
        """Return the scores."""
        return scores


class _Pair(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return Pair(scores, features.mean(positions(features)))


class _Dataclass(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return Output(scores, {"inner": [features]}, scores.square().mean())


class _Nested(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return {"scores": scores, "more": {"levels": [features.amax(positions(features)), (scores * 2,)], "none": None}}


class _Namespace(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return SimpleNamespace(scores=scores, energy=float(features.detach().square().mean()))


class _Slots(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return Slots(scores, features.sum(positions(features)))


class _Normal(Ending):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.spread = nn.Linear(3, 3)

    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return torch.distributions.Normal(scores, self.spread(scores).exp(), validate_args=False)


class _Categorical(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return torch.distributions.Categorical(logits=scores, validate_args=False)


class _Left(Ending):
    """Leaves a loss and statistics on the module."""

    def forward(self, features: Tensor, scores: Tensor) -> Any:
        self.penalty = features.square().mean()
        self.statistics = {"mean": float(features.detach().mean()), "scores": scores.detach()}
        return scores


class _Array(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return scores.detach().numpy(), features.detach().mean().item()


class _Names(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return [["a", "b", "c"][n] for n in scores.argmax(-1).tolist()], scores.softmax(-1)


class _Ordered(Ending):
    def forward(self, features: Tensor, scores: Tensor) -> Any:
        result = OrderedDict(out=scores)
        result["aux"] = features[:, :2] if features.ndim == 4 else features[..., :2]
        return result


class _Sparse(Ending):
    """Returns only what is above a limit."""

    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return scores[scores > 0], scores.topk(2, -1)


class _Lazy(Ending):
    """Returns a function."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.late = nn.Linear(3, 2)

    def forward(self, features: Tensor, scores: Tensor) -> Any:
        return {"scores": scores, "shape": tuple(scores.shape), "text": f"{len(scores)} rows"}


ENDINGS = [
    Ending, Ending, _Pair, _Dataclass, _Nested, _Namespace, _Slots, _Normal, _Categorical, _Left, _Array, _Names,
    _Ordered, _Sparse, _Lazy,
]  # fmt: skip


@block()
class LeavesLoss(Block):
    """Leaves a loss on the module, for whoever sums them up."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.loss, self.out = layer(kind, width, 6), None, 6
        self.when = draw.choice(["always", "training"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.body(x)
        if self.when == "always" or self.training:
            self.loss = y.abs().mean()
        return y.relu()


@block()
class LeavesFeatures(Block):
    """Leaves features on the module: an attribute, a list, a dictionary, a tuple."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6), 6
        self.kept: list[Tensor] = []
        self.table: dict[str, Any] = {}
        self.features: Any = None
        self.how = draw.choice(["attribute", "list", "dict", "tuple"])

    def forward(self, x: Tensor) -> Any:
        """Return features."""
        y = self.body(x).sigmoid()
        small = y.detach().mean(positions(y))
        if self.how == "attribute":
            self.features = small
        elif self.how == "list":
            self.kept.append(small)
        elif self.how == "dict":
            self.table["last"] = small
        else:
            self.features = (small, {"again": small * 2})
        return y


@block()
class ReturnsFeatures(Block):
    """Gives intermediate features to whoever called, in containers."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.body, self.out = layer(kind, width, 6), 6
        self.how = draw.choice(["pair", "dict", "number", "output", "list"])

    def forward(self, x: Tensor) -> Any:
        """Return features and something else."""
        y = self.body(x).tanh()
        if self.how == "pair":
            return y, Pair(y.mean(positions(y)), None)
        if self.how == "dict":
            return y, {"penalty": (y * y).mean(), "name": "features"}
        if self.how == "number":
            return y, float(y.detach().max())
        return y, Output(y.sum(), [y.detach()]) if self.how == "output" else [y.amax(positions(y))] * 2


@block()
class FillsList(Block):
    """A function that fills a list of its caller."""

    def __init__(self, kind: str, width: int, draw: random.Random) -> None:
        super().__init__(kind, width, draw)
        self.first, self.second, self.out = layer(kind, width, 6), layer(kind, 6, 6), 6

    def _run(self, x: Tensor, features: list[Tensor]) -> Tensor:
        y = self.first(x).relu()
        features.append(y)
        return self.second(y)

    def forward(self, x: Tensor) -> Any:
        """Return the features that were collected."""
        features: list[Tensor] = []
        y = self._run(x, features)
        return y + features[0], [f.mean() for f in features]
