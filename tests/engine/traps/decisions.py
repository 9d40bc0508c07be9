"""Traps: code that decides by the numbers in tensors, as no input that the engine sees decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import tracer
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


class _Choice(nn.Module):
    """Two layers, one of which runs; inputs with a large mean are rare.

    Args:
        choose: returns features, of the network, its input, and the hidden features.
    """

    def __init__(self, choose: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.choose, self.head = nn.Linear(5, 6), choose, nn.Linear(8, 3)
        self.usual, self.rare, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.same, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.choose(self, x, self.stem(x).relu()))


def _by_return(net: Any, x: Tensor, h: Tensor) -> Tensor:
    if x.mean() > 5:
        return net.rare(h).tanh()
    return net.usual(h).relu()


def _by_assignment(net: Any, x: Tensor, h: Tensor) -> Tensor:
    y = net.usual(h)
    if x.mean() > 5:
        y = net.rare(h)
    return y + net.last(h)


def _by_expression(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return ((net.rare if x.mean() > 5 else net.usual)(h)).relu()


def _by_name(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return getattr(net, "rare" if x.mean() > 5 else "usual")(h)


def _by_index(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return [net.usual, net.rare][int(x.mean() > 5)](h)


def _by_table(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return {False: net.usual, True: net.rare}[bool(x.mean() > 5)](h)


def _by_error(net: Any, x: Tensor, h: Tensor) -> Tensor:
    try:
        if x.mean() > 5:
            raise ValueError
        return net.usual(h)
    except ValueError:
        return net.rare(h)


def _by_loop(net: Any, x: Tensor, h: Tensor) -> Tensor:
    for layer in (net.rare, net.last, net.usual):
        y = layer(h)
        if x.mean() > 5:
            break
    return y


def _each_sample(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([_by_return(net, *pair) for pair in zip(x.split(1), h.split(1), strict=True)])


def _early(net: Any, x: Tensor, h: Tensor) -> Tensor:
    for layer in (net.same, net.other):
        if x.mean() > 5:
            return net.rare(h)
        h = layer(h).relu()
    return net.usual(h)


def _refined(net: Any, x: Tensor, h: Tensor) -> Tensor:
    while x.mean() > 5:
        h, x = net.same(h).tanh(), x - 4
    return net.usual(h)


def _expert(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return [net.usual, net.rare, net.last][int((x.mean().clamp(0) / 5).floor().clamp(max=2))](h)


def _skipped(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.usual(h if x.mean() > 5 else net.same(h).relu())


def _by_number(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.rare(h) if x.mean().item() > 5 else net.usual(h)


def _by_float(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.rare(h) if 5 < float(x.mean()) < 1e5 or float(x.mean()) > 5 else net.usual(h)


def _by_list(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.rare(h) if max(x.mean(1).tolist()) > 5 else net.usual(h)


def _by_array(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.rare(h) if (x.detach().numpy() > 5).any() else net.usual(h)


def _by_count(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.rare(h) if int((x > 5).sum()) > 9 else net.usual(h)


def _by_size(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.rare(h) if x[x > 5].numel() > 9 else net.usual(h)


def _by_length(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.rare(h) if len((x > 5).nonzero()) > 9 else net.usual(h)


def _by_equality(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return net.rare(h) if torch.equal(x, x.clamp(min=5)) else net.usual(h)


def _shifted(shift: float) -> Use:
    def use(model: nn.Module) -> Any:
        noise = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with torch.no_grad():
            return model.eval()(noise.abs() + shift)

    return use


def _trap(name: str, source: str, choose: Callable[[Any, Tensor, Tensor], Tensor], **more: Any) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=lambda: _Choice(choose),
        example=lambda model: torch.zeros(4, 5, dtype=torch.float64),
        uses=[_shifted(shift) for shift in (0.0, 7.0, 12.0)],
        **more,
    )


TRAPS = [
    _trap("one layer or another, by the data", "gated networks: if gate > threshold, early return", _by_return),
    _trap("another layer's features, by the data", "features replaced in a condition", _by_assignment),
    _trap("a layer in a conditional expression on data", "(a if condition else b)(x)", _by_expression),
    _trap("a layer by its name, by the data", "getattr(self, name)(x)", _by_name),
    _trap("an item of a list, by the data", "layers[int(condition)](x)", _by_index),
    _trap("an item of a dictionary, by the data", "dispatch tables", _by_table),
    _trap("a layer for what raises", "try, except as control flow", _by_error),
    _trap("a loop that the data end", "early exit: BranchyNet, PABEE", _by_loop),
    _trap("each sample its layer", "dynamic networks with per-sample inference", _each_sample),
    _trap("an exit between layers", "multi-exit networks: return head(h) in the loop", _early),
    _trap("refined while the data say so", "deep equilibrium, iterative refinement", _refined),
    _trap("one of three experts", "hard mixture of experts by int(index)", _expert),
    _trap("a layer skipped by the data", "SkipNet, mixture of depths", _skipped),
    _trap("a number that is compared", "x.mean().item() > threshold", _by_number),
    _trap("a float that is compared", "float(x.mean()) > threshold", _by_float),
    _trap("a list whose maximum is compared", "max(scores.tolist())", _by_list),
    _trap("an array that is compared", "x.numpy() in forward", _by_array),
    _trap("a count that is compared", "int(mask.sum()) > k", _by_count),
    _trap("the size of a selection is compared", "if boxes.numel() == 0, in detectors", _by_size),
    _trap("the length of a selection is compared", "if len(mask.nonzero()), in mixtures of experts", _by_length),
    _trap("equality that is asked", "if torch.equal(a, b)", _by_equality),
]


class _OddWhileTraining(nn.Module):
    """One layer for odd batches and another for even ones, in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.odd, self.even = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        if self.training:
            h = {0: self.even, 1: self.odd}[h.shape[0] % 2](h).tanh()
        return self.head(h)


class _WhileTrainingOdd(_OddWhileTraining):
    """One layer for odd batches, and another one after it in train mode."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        if h.shape[0] % 2:
            h = self.even(h).tanh()
            if self.training:
                h = self.odd(h).tanh()
        return self.head(h)


def _step_of(count: int) -> Use:
    def use(model: nn.Module) -> Any:
        noise = torch.randn(count, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return model.train()(noise).detach()

    return use


def _odd_batches(name: str, make: Callable[[], nn.Module]) -> Trap:
    return Trap(
        name=name,
        source="mixup of pairs, and other augmentation of features",
        make=make,
        example=lambda model: torch.zeros(4, 5, dtype=torch.float64),
        uses=[_shifted(0.0)],
        trains=[_step_of(4), _step_of(7)],
        exact_in_train=True,
    )


TRAPS += [
    _odd_batches("a layer for odd batches while training", _OddWhileTraining),
    _odd_batches("a layer while training for odd batches", _WhileTrainingOdd),
]


def _recorded_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "record_data_decisions", lambda *run: [])


ABLATIONS = [
    Ablation("decisions on data are recorded both ways", _recorded_one_way, "an item of a list, by the data"),
]
