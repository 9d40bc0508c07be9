"""Random networks of blocks, and random masks for them, each from one number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.exactness import (
    Masks,
    channel_masks,
    column_masks,
    element_masks,
    layers,
    out_dim,
    parameters,
    randomised,
)
from tests.engine.random_traps import memory, modes, outputs, reads, shapes, sizes, state, weights, wrappers
from tests.engine.random_traps.blocks import BLOCKS, Block, layer, positions
from tests.engine.random_traps.plain import Plain

__all__ = ["STYLES", "RandomNet", "random_masks", "random_net"]

SOURCES = (memory, modes, outputs, reads, shapes, sizes, state, weights, wrappers)
"""They list their blocks when they are imported."""


class RandomNet(nn.Module):
    """A stem, blocks, and a head; returns scores in some container, and what blocks gave beside features.

    Args:
        kind: "image", "tokens" or "words".
        draw: chooses.
        count: of blocks.
    """

    def __init__(self, kind: str, draw: random.Random, count: int) -> None:
        super().__init__()
        inner, width = "image" if kind == "image" else "tokens", draw.choice([6, 8])
        self.stem: nn.Module = nn.Embedding(11, width) if kind == "words" else layer(inner, 3, width, 3)
        self.enter = layer(inner, width, width) if kind == "words" else nn.Identity()
        self.blocks = nn.ModuleList()
        for _ in range(count):
            cls = draw.choice(BLOCKS[inner])
            for make in (cls, Plain) if draw.random() < 0.4 else (cls,):
                self.blocks.append(make(inner, width, draw))
                width = self.blocks[-1].out
        self.last, self.head = layer(inner, width, 6), nn.Linear(6, 3)
        self.ending = draw.choice(outputs.ENDINGS)(6)

    def forward(self, x: Tensor) -> Any:
        """Return whatever the ending makes of it."""
        x, extras = self.enter(self.stem(x)).relu(), []
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, extra = x
                extras.append(extra)
        x = self.last(x).relu()
        out = self.ending(x, self.head(x.mean(positions(x))))
        return (out, extras) if extras else out

    def noisy(self) -> bool:
        """Whether two networks of other widths draw other noise in train mode."""
        return any(isinstance(block, Block) and block.noisy for block in self.modules())

    def tolerance(self) -> float:
        """What may differ."""
        return max((block.tolerance for block in self.modules() if isinstance(block, Block)), default=1e-9)


Inputs = Callable[..., Tensor]
"""Makes an input of a batch size and sizes of the positions, from a seed."""


def random_net(seed: int) -> tuple[nn.Module, Inputs, tuple[int, ...]]:
    """Return a network, what makes inputs for it, and the shape of the example."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = draw.choice(["image", "image", "tokens", "words"])
    net = randomised(RandomNet(kind, draw, draw.choice([1, 1, 2, 2, 3, 4])), seed)

    def make(batch: int, *size: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if kind == "words":
            return torch.randint(11, (batch, *size), generator=generator)
        shape = (batch, 3, *size) if kind == "image" else (batch, *size, 3)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    side = draw.choice([4, 6, 8])
    return net, make, (draw.choice([2, 3, 4]), *((side, side) if kind == "image" else (draw.choice([4, 5, 6]),)))


def _coupled(model: nn.Module, seed: int) -> Masks:
    """Mask the same channels of all layers of one width."""
    masks: Masks = {}
    for name, module in layers(model):
        dim = out_dim(module)
        channels = module.weight.shape[dim]
        kept = (torch.rand(channels, generator=torch.Generator().manual_seed(seed)) < 0.6).double()
        shape = [-1 if d == dim else 1 for d in range(module.weight.ndim)]
        masks[name] = {"weight": kept.view(shape).expand(module.weight.shape)}
        if module.bias is not None and len(module.bias) == channels:
            masks[name]["bias"] = kept
    return masks


def _all_but_one(model: nn.Module, seed: int) -> Masks:
    masks = channel_masks(model, seed, amount=1.0)
    for name, module in layers(model):
        at = seed % module.weight.shape[out_dim(module)]
        masks[name] = {key: mask.clone() for key, mask in masks[name].items()}
        masks[name]["weight"].select(out_dim(module), at).fill_(1)
        if "bias" in masks[name]:
            masks[name]["bias"][at] = 1
    return masks


def _some_layers(model: nn.Module, seed: int) -> Masks:
    """Mask some layers as a whole, half of the channels of others, and nothing of the rest."""
    draw, whole = random.Random(seed), channel_masks(model, seed, amount=1.0)
    part = channel_masks(model, seed)
    return {name: draw.choice([whole, part, part])[name] for name in part if draw.random() < 0.7}


def _rows(model: nn.Module, seed: int) -> Masks:
    """Mask rows of every parameter of two dimensions and more, those of no layer included."""
    generator, masks = torch.Generator().manual_seed(seed), channel_masks(model, seed)
    for name, parameter in model.named_parameters():
        module, _, key = name.rpartition(".")
        if parameter.ndim > 1 and module not in masks and key not in ("original0", "original1", "grid"):
            kept = (torch.rand(len(parameter), generator=generator) < 0.6).double()
            masks.setdefault(module, {})[key] = kept.view(-1, *[1] * (parameter.ndim - 1)).expand_as(parameter)
    return masks


STYLES: dict[str, Callable[[nn.Module, int], Masks]] = {
    "channels": channel_masks,
    "coupled": _coupled,
    "most": lambda model, seed: channel_masks(model, seed, amount=0.8),
    "all but one": _all_but_one,
    "layers": _some_layers,
    "rows": _rows,
    "elements": element_masks,
    "columns": column_masks,
}


def random_masks(model: nn.Module, seed: int) -> tuple[str, Masks, str | None]:
    """Return a style, masks of it, and how they are to be repaired; None where they stay as they are."""
    draw = random.Random(seed + 1)
    style = draw.choice([*STYLES, "channels", "coupled", "coupled", "coupled"])
    policy = draw.choice([None, None, "union", "intersection", "score"])
    assert parameters(model)
    return style, STYLES[style](model, seed), policy
