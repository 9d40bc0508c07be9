"""Traps: what random networks of the other traps' idioms have shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.alternatives import attributes, other_sizes
from engine.removal import keep
from engine.verification import training
from tests.engine.exactness import Masks, layers
from tests.engine.nets import dead
from tests.engine.traps.modes import body_masks, image
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _divided(x: Tensor) -> Tensor:
    """Return the input; its gradient is divided by its number of channels."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.shape[1])
    return x


class _Policy(nn.Module):
    """An actor that returns a distribution, and keeps the loss of its critic."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.body, self.head, self.keeps, self.loss = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), keeps, None

    def forward(self, x: Tensor) -> Any:
        y = self.head(_divided(self.body(x)).relu()).mean((2, 3))
        if self.keeps:
            self.loss = y.square().mean()
            return None
        return torch.distributions.Normal(y, torch.ones_like(y), validate_args=False)


def _step(read: Callable[[Any, Any], Tensor]) -> Use:
    """Return a use that trains for one step, and returns the gradient of the input."""

    def use(model: nn.Module) -> Any:
        x = _noise(3, 3, 7, 7).requires_grad_()
        read(model.train(), model(x)).sum().backward()
        return x.grad

    return use


def _location(model: nn.Module) -> Any:
    return once(3, 3, 9, 7)(model).loc


def _kept_loss(model: nn.Module) -> Any:
    once(3, 3, 9, 7)(model)
    return model.loss


class _Sigma(nn.Module):
    """A linear layer over its largest singular value, by a vector in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.register_buffer("u", torch.ones(6) / 6**0.5)

    def forward(self, x: Tensor) -> Tensor:
        w = self.body.weight
        with torch.no_grad():
            v = F.normalize(w.T @ self.u, dim=0)
            self.u.copy_(F.normalize(w @ v, dim=0))
        return self.head(F.linear(self.stem(x).relu(), w / (self.u @ w @ v + 0.1), self.body.bias).relu())


class _Growing(nn.Module):
    """Stages that a schedule switches on one after the other, or of which it picks one."""

    def __init__(self, picks: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.stages = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(4))
        self.depth, self.picks = 1, picks

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        if self.picks:
            return self.head(self.stages[self.depth](y).relu())
        for stage in self.stages[: self.depth]:
            y = stage(y).relu()
        return self.head(y)

    def grow(self, depth: int) -> None:
        """Let other stages run."""
        self.depth = depth


class _InPairs(_Growing):
    """Stages in pairs."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        for k in range(0, self.depth, 2):
            y = self.stages[k + 1](self.stages[k](y).relu()).relu()
        return self.head(y)


def _the_same_channels(model: nn.Module, seed: int) -> Masks:
    kept = (torch.arange(8) % 2 == seed).double()
    weight = kept[:, None, None, None]
    wide = [(name, layer) for name, layer in layers(model) if len(layer.weight) == 8]
    return {name: {"weight": weight.expand_as(layer.weight), "bias": kept} for name, layer in wide}


def _grown(depth: int) -> Use:
    def use(model: nn.Module) -> Any:
        model.grow(depth)
        return once(2, 3, 5, 7)(model)

    return use


class _LargeBatch(nn.Module):
    """Large batches take another layer: the limit is compared with a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.other, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        if len(x) > 3:
            y = self.other(y).tanh()
        return self.head(y)


class _Widened(nn.Module):
    """A padded layer, in front of which a branch may be switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.extra = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1)
        self.body, self.head, self.enabled = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(4, 3, 1), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = y + self.extra(y).tanh() if self.enabled else y
        return self.head(self.body(y).relu())

    def enable(self) -> None:
        """Switch it on."""
        self.enabled = True


def _enabled(model: nn.Module) -> Any:
    model.enable()
    return once(2, 3, 5, 7)(model)


def _constant_channels(model: Any, seed: int) -> Masks:
    """Three channels of the stem are constants; the branch leaves two of them alone, and not the largest."""
    largest, *others = model.stem.bias.abs().argsort(descending=True)[:3].tolist()
    return dead(model, {"stem": [largest, *others]}) | dead(model, {"extra": others}, bias=True)


TRAPS = [
    Trap(
        name="a constant that a branch makes vary",
        source="adapters that are switched on (peft), beside channels that a mask has made constant",
        make=_Widened,
        example=image,
        uses=[once(2, 3, 5, 7), _enabled],
        masks=_constant_channels,
        shrinks=True,
    ),
    Trap(
        name="a distribution whose gradient counts channels",
        source="policies that return torch.distributions.Normal (vwxyzjn/cleanrl), with a hook on an activation",
        make=lambda: _Policy(False),
        example=image,
        uses=[_location],
        trains=[_step(lambda model, out: out.loc)],
        exact_in_train=False,
        masks=body_masks,
        shrinks=True,
    ),
    Trap(
        name="a loss on the module whose gradient counts channels",
        source="auxiliary losses that layers keep (davidmrau/mixture-of-experts, fairseq's quant noise), with a hook",
        make=lambda: _Policy(True),
        example=image,
        uses=[_kept_loss],
        trains=[_step(lambda model, out: model.loss)],
        exact_in_train=False,
        masks=body_masks,
        shrinks=True,
    ),
    Trap(
        name="the largest singular value by hand",
        source="spectral norm by hand with u in a buffer (christiancosgrove/pytorch-spectral-normalization-gan)",
        make=_Sigma,
        example=lambda model: torch.zeros(3, 5, dtype=torch.float64),
        uses=[lambda model: [once(4, 5)(model), once(1, 5)(model)]],
    ),
    *(
        Trap(
            name=f"stages of which a schedule {way}",
            source="progressive growing (arXiv 1710.10196), elastic depth of once-for-all networks (arXiv 1908.09791)",
            make=make,
            example=image,
            uses=[_grown(3), _grown(2), _grown(0)],
            shrinks="repaired",
            masks=_the_same_channels,
        )
        for way, make in (
            ("picks one", lambda: _Growing(picks=True)),
            ("runs more and more", _Growing),
            ("runs in pairs", _InPairs),
        )
    ),
    Trap(
        name="large batches take another layer",
        source="chunked evaluation of large batches: if len(x) > limit",
        make=_LargeBatch,
        example=image,
        uses=[once(4, 3, 5, 7), once(7, 3, 6, 6), once(1, 3, 6, 6)],
        shrinks="repaired",
    ),
]


def _only_containers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(training, "results_of", lambda out, *rest: [out] if isinstance(out, Tensor) else [])


def _no_stages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attributes, "_layer_counts", lambda attribute: set())


def _batch_of_one(patch: pytest.MonkeyPatch) -> None:
    for name in ("_try", "_try_across"):
        patch.setattr(other_sizes.OtherSizes, name, _without_batches(getattr(other_sizes.OtherSizes, name)))


def _without_batches(attempt: Callable[..., None]) -> Callable[..., None]:
    def attempts(self: Any, *args: Any) -> None:
        if not any(axis.batch for axis in args[-2]):
            attempt(self, *args)

    return attempts


def _constants_of_each_call(patch: pytest.MonkeyPatch) -> None:
    merged = keep._merged
    patch.setattr(keep, "_merged", lambda readers: (replace(c, shared=c.constants) for c in merged(readers)))


ABLATIONS = [
    Ablation(
        "a carrier is constant at each call of a weight",
        _constants_of_each_call,
        "a constant that a branch makes vary",
    ),
    Ablation(
        "train mode is compared by what a step returns in objects",
        _only_containers,
        "a distribution whose gradient counts channels",
    ),
    Ablation("numbers of stages are recorded", _no_stages, "stages of which a schedule runs in pairs", True),
    Ablation("decisions by the batch size are seen at four", _batch_of_one, "large batches take another layer", True),
]
