"""Small networks and masks that several test files share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.analysis.constants import Constants
from engine.compaction.build import Analysis, analyse, canonical_tensors
from engine.masks import canonical_masks
from engine.removal.propagate import Structure
from engine.removal.structure import structure_of
from tests.engine.exactness import Masks, out_dim, randomised


class Net(nn.Module):
    """Named parts and a function of ``(net, *inputs)`` as its forward."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(self, *args, **kwargs)


class Mean(nn.Module):
    """Mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (batch, channels)."""
        return x.flatten(2).mean(2)


class Auxiliary(nn.Module):
    """A second head that runs in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.head, self.aux = nn.Linear(4, 2), nn.Sequential(nn.Conv2d(6, 5, 1), nn.Flatten(), nn.Linear(180, 2))

    def forward(self, x: Tensor) -> Any:
        """Return scores, and those of the auxiliary head while training."""
        x = torch.relu(self.stem(x))
        scores = self.head(self.body(x).mean((2, 3)))
        return (scores, self.aux(x)) if self.training else scores


def plain(bias: bool = True, padding: int = 1) -> nn.Module:
    """Convolution, batch norm, relu, convolution, mean, linear."""
    return randomised(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=padding, bias=bias),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3, padding=padding, bias=bias),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            Mean(),
            nn.Linear(5, 3),
        )
    )


def residual_net() -> nn.Module:
    """A stem and a branch of the same width that are added, and a head."""
    return randomised(
        Net(
            lambda m, x: m.head(torch.relu(m.norm(m.stem(x)) + m.branch(torch.relu(m.stem(x)))).mean((2, 3))),
            stem=nn.Conv2d(3, 6, 1),
            norm=nn.BatchNorm2d(6),
            branch=nn.Conv2d(6, 6, 3, padding=1),
            head=nn.Linear(6, 2),
        )
    )


def image(size: int = 6, batch: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Random input of shape (batch, 3, size, size)."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def dead(model: nn.Module, rows: Mapping[str, Iterable[int]], bias: bool = False) -> Masks:
    """Masks that close the given outputs of layers; norms by their weight (and bias)."""
    masks: Masks = {}
    for name, closed in rows.items():
        module = model.get_submodule(name)
        weight: Tensor = module.weight
        dim = out_dim(module)
        mask = torch.ones(weight.shape)
        mask.index_fill_(dim, torch.tensor(list(closed), dtype=torch.long), 0)
        masks[name] = {"weight": mask}
        if bias and module.bias is not None:
            kept = torch.ones(module.bias.shape)
            kept[list(closed)] = 0
            masks[name]["bias"] = kept
    return masks


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A deep copy of the state."""
    return copy.deepcopy(dict(model.state_dict()))


def unchanged(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    """Whether the state is bit for bit the same."""
    now = model.state_dict()
    return now.keys() == before.keys() and all(
        v.dtype == before[k].dtype and v.shape == before[k].shape and torch.equal(v, before[k]) for k, v in now.items()
    )


def analysis_of(model: nn.Module, example: Any, masks: Masks | None) -> Analysis:
    """Trace and analyse."""
    canonical = None if masks is None else canonical_masks(masks, model)
    return analyse(model, engine.trace(model, example), engine.RULES, canonical)


def structure(model: nn.Module, example: Any) -> Structure:
    """Trace and propagate."""
    return structure_of(engine.trace(model, example), engine.RULES)


def constants_of(model: nn.Module, example: Any, masks: Masks | None = None, repaired: bool = False) -> Constants:
    """Trace and find constants."""
    graph = engine.trace(model, example)
    canonical = None if masks is None else canonical_masks(masks, model)
    return Constants(graph, engine.RULES, canonical_tensors(model, graph), canonical, repaired)
